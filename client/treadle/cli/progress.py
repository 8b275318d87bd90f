"""How a node's start is shown: a live line on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final, TextIO

QUIET_S: Final = 10.0  # without news, a line this often says that it still goes on
STEP: Final = 0.25  # of the load; each step is a line where there is no terminal

_CLEAR: Final = "\r\x1b[2K"


class Progress:
    """Lines about a node that is not ready yet, on ``stream``."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._live = stream.isatty()
        self._clock = clock
        self._shown = ""
        self._mark: tuple[str, int] = ("", -1)
        self._due = 0.0

    def show(self, facts: dict[str, Any] | None) -> None:
        """The node's facts of now; None where the broker does not answer yet."""
        phase, load = phase_of(facts)
        text = f"{phase} {load:.0%}" if 0.0 < load < 1.0 else phase
        if self._live:
            self._replace(text)
            return
        mark, now = (phase, int(load / STEP)), self._clock()
        if mark != self._mark or now >= self._due:
            self._mark, self._due = mark, now + QUIET_S
            self._print(text)

    def say(self, text: str) -> None:
        """One line that stays."""
        self.clear()
        self._print(text)

    def clear(self) -> None:
        """Take the live line away."""
        if self._shown:
            self._stream.write(_CLEAR)
            self._stream.flush()
            self._shown = ""

    def _replace(self, text: str) -> None:
        if text != self._shown:
            self._stream.write(f"{_CLEAR}treadle: {text}")
            self._stream.flush()
            self._shown = text

    def _print(self, text: str) -> None:
        self._stream.write(f"treadle: {text}\n")  # in one write: the node's processes log to the same place
        self._stream.flush()


def phase_of(facts: dict[str, Any] | None) -> tuple[str, float]:
    """What the node does, in words, and how far its load has come (0 to 1)."""
    if facts is None:
        return "starting the broker", 0.0
    if facts.get("reason") == "draining":
        return "draining", 0.0
    load = facts.get("load")
    phase = facts.get("phase") or ""
    words = _PHASES.get(phase, phase) or facts.get("reason") or "waiting for the worker"
    return str(words), float(load) if isinstance(load, int | float) else 0.0


_PHASES: Final = {
    "absent": "waiting for the worker",
    "loading": "loading the model",
    "testing": "testing the model",
    "ready": "ready",
    "draining": "draining",
}
