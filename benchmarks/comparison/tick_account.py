"""Where a node's worker spent its time, from the tick events that the broker keeps for its replay: asked for
afterwards and without a subscription, it costs the run nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import zmq

from comparison.systems import Account
from treadle.tail import Gap, TelemetryEvent, fetch_replay
from treadle_shared.rundir import RuntimeDir

_TOPIC: Final = "tick"
_MOST: Final = 1 << 15  # events asked for; the longest run makes a third of it


class TickAccount(Account):
    """Counts from ``begin`` to ``figures``. The node must keep every tick event that comes meanwhile."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._first = 0

    def begin(self) -> None:
        """The ticks before this do not count."""
        before = self._since(0)
        self._first = before[-1].sequence + 1 if before else 0

    def figures(self) -> dict[str, float]:
        """See ``account``; nothing where no tick ran, or some are no longer kept."""
        events = self._since(self._first)
        complete = events and events[0].sequence == self._first
        return account([event.facts for event in events]) if complete else {}

    def _since(self, first: int) -> list[TelemetryEvent]:
        with zmq.Context[zmq.Socket[bytes]]() as context:
            return fetch_replay(context, RuntimeDir(self._directory), Gap(_TOPIC, first, first + _MOST - 1))


def account(events: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Sums over tick events, in seconds, and over their rows.

    ``engine_s`` inside the engine's calls, of decode and of prefill, ``sample_s`` in sampling, ``rest_s`` what the
    worker needed beside both; ``ticks`` sent, ``decode_rows`` and ``prefill_rows`` in them.
    """
    sums = dict.fromkeys(("ticks", "decode_rows", "prefill_rows", "decode_s", "prefill_s", "sample_s", "rest_s"), 0.0)
    for event in events:
        if event["event"] == "sent":
            sums["ticks"] += 1
            sums["decode_rows"] += event["decode"]
            sums["prefill_rows"] += sum(event["prefill"])
        elif event["event"] == "ran":
            sums["prefill_s" if event["part"] else "decode_s"] += event["engine_s"]
            sums["sample_s"] += event["sample_s"]
            sums["rest_s"] += event["total_s"] - event["engine_s"] - event["sample_s"]
    return {f"worker_{name}": value for name, value in sums.items()}
