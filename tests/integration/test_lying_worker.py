"""A worker whose results come twice, late, too early, for nobody, or never: every text comes out whole all the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from real_node import RealNode, wait_for

OPTIONS: dict[str, Any] = {"max_tokens": 300, "ignore_eos": True, "temperature": 0.8, "seed": 3}
PROMPTS = [f"told {number}" for number in range(8)]
SETTINGS: dict[str, Any] = {"engine": "reference", "session_tokens": 1024, "max_sessions": 8}


@pytest.fixture(scope="module")
def quiet() -> list[str]:
    """What an honest worker says."""
    node = RealNode(**SETTINGS).start().wait_ready()
    with node.client() as client:
        texts = [session.result() for session in [client.generate(prompt, **OPTIONS) for prompt in PROMPTS]]
    node.stop()
    node.remove()
    return texts


@pytest.fixture
def node(make_node: Any) -> RealNode:
    return make_node(**SETTINGS).start("broker")


@pytest.mark.parametrize("lie", ["repeats", "invents", "reorders", "loses", "parts"])
def test_what_a_worker_says_too_often_or_out_of_order_reaches_no_stream(
    node: RealNode, quiet: list[str], lie: str
) -> None:
    script = Path(__file__).with_name("lying_worker.py")
    liar = subprocess.Popen([sys.executable, str(script), str(node.path), lie])
    try:
        wait_for(node.directory.is_live, "the broker holds its directory")
        with node.client() as client:
            wait_for(lambda: client.status()["ready"], "the liar serves", 60)
            ended = client.generate("gone before", max_tokens=3, ignore_eos=True)
            ended.wait(30)
            sessions = [client.generate(prompt, **OPTIONS) for prompt in PROMPTS]
            assert [session.result(40) for session in sessions] == quiet
            assert len(ended.tokens) == 3
            facts = client.status()
            assert facts["pids"] == {"broker": node.processes["broker"].pid, "worker": liar.pid}
            if lie in ("repeats", "invents"):
                assert facts["counters"]["stale_results"] > 300
            assert facts["telemetry"]["failed_total"] == 0
        node.wait_idle()
    finally:
        liar.kill()
        liar.wait()
