"""How long a tick takes, from answer to answer."""

from __future__ import annotations


class Cadence:
    """Ticks whose answers left together share the time that they took. ``answered_at`` is when the last one was."""

    def __init__(self) -> None:
        self.answered_at = 0.0
        self._began_at: float | None = None
        self._ticks = 0

    def answered(self, sent_at: float, now: float, *, runs: bool, more: bool) -> float | None:
        """A tick that was sent at ``sent_at`` has its answer, and computed something if it ``runs``; ``more`` may have
        left with it. Seconds a tick took, where that is known now.
        """
        if self._began_at is None:
            self._began_at = max(sent_at, self.answered_at)
        self._ticks += runs
        self.answered_at = now
        if more:
            return None
        took = (now - self._began_at) / self._ticks if self._ticks else None
        self.begin_anew()
        return took

    def begin_anew(self) -> None:
        """The next tick begins anew: what was in flight has its answer, or is lost."""
        self._began_at, self._ticks = None, 0
