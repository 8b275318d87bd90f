"""Log lines, which several processes write to one pipe."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator

import pytest
import structlog

from treadle.cli.progress import Progress
from treadle_shared.log import get_logger, set_up_logging


class Writes(io.StringIO):
    """A stream that keeps what each call wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def write(self, text: str) -> int:
        self.calls.append(text)
        return len(text)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Leaves nothing of what a test has set up."""
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def test_a_log_line_leaves_in_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Writes()
    monkeypatch.setattr(sys, "stderr", stream)
    set_up_logging("broker", style="json")
    get_logger("link").info("worker_ready", pid=7)
    (line,) = stream.calls
    assert line.endswith("}\n")
    assert json.loads(line)["process"] == "broker"


def test_what_a_command_says_leaves_in_one_write() -> None:
    stream = Writes()
    Progress(stream).say("ready again")
    assert stream.calls == ["treadle: ready again\n"]
