"""The chaos command in its short form."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CHAOS = Path(__file__).parents[1] / "chaos" / "chaos.py"


@pytest.mark.parametrize("more", [[], ["--turns"]], ids=["reserve", "optimistic"])
def test_a_short_storm_leaves_no_violation(more: list[str]) -> None:
    length = ["--seconds", "20", "--seed", "3", "--pause", "0.5", "--longest", "120"]
    command = [sys.executable, str(CHAOS), *length, *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    summary = json.loads(done.stdout[done.stdout.index("{") :])
    assert summary["violations"] == []
    assert summary["faults_total"] >= 3
    assert summary["finished_sessions"] >= 20
