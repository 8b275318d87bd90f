"""Counts what goes wrong, and says when it is time to log it again."""

from __future__ import annotations

from typing import Final

LOG_EVERY_S: Final = 1.0  # a flood of bad frames makes one line a second, not one a frame


class Throttle:
    """Counts events; ``due`` tells at most once a period how many came since it last did."""

    def __init__(self, every_s: float = LOG_EVERY_S) -> None:
        self.total = 0
        self._told = 0
        self._every_s = every_s
        self._next = float("-inf")

    def count(self) -> None:
        """One more."""
        self.total += 1

    def due(self, now: float) -> int:
        """How many new ones to log now; 0 for none, or not yet."""
        fresh = self.total - self._told
        if fresh == 0 or now < self._next:
            return 0
        self._told, self._next = self.total, now + self._every_s
        return fresh
