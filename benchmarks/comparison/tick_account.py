"""Where a node's worker spent its time, from the tick events that the broker keeps for its replay: asked for
afterwards, it costs the run nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from comparison.systems import Account
from treadle.tail import Gap, TelemetryEvent, TelemetryTail

_TOPIC: Final = "tick"
_ANSWER_S: Final = 2.0  # a new subscriber gets the last event at once


class TickAccount(Account):
    """Counts from ``begin`` to ``figures``. The node must keep every tick event that comes meanwhile."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._first = 0

    def begin(self) -> None:
        """The ticks before this do not count."""
        self._first = self._last() + 1

    def figures(self) -> dict[str, float]:
        """See ``account``; nothing where no tick ran, or some are no longer kept."""
        with TelemetryTail(self._directory, (_TOPIC,)) as tail:
            last = _newest(tail)
            events = tail.replay(Gap(_TOPIC, self._first, last)) if last >= self._first else []
        return account([event.facts for event in events]) if len(events) == last - self._first + 1 else {}

    def _last(self) -> int:
        with TelemetryTail(self._directory, (_TOPIC,)) as tail:
            return _newest(tail)


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


def _newest(tail: TelemetryTail) -> int:
    """The sequence number of the last tick event; -1 where there is none yet."""
    events = [event for event in tail.receive(_ANSWER_S) if isinstance(event, TelemetryEvent)]
    return events[-1].sequence if events else -1
