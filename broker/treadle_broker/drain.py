"""Stopping: finish what runs within a timeout, then cancel the rest, then leave."""

from __future__ import annotations

from enum import Enum, auto

_FAREWELL_S = 1.0  # how long last messages may take to reach clients that still read


class Phase(Enum):
    """How far the stop has come."""

    SERVING = auto()
    DRAINING = auto()
    CANCELLING = auto()
    STOPPED = auto()


class DrainClock:
    """Decides when a stop moves on. ``force`` skips the waiting."""

    def __init__(self, timeout_s: float) -> None:
        self.phase = Phase.SERVING
        self.forced = False
        self._timeout_s = timeout_s
        self._deadline = float("inf")

    @property
    def draining(self) -> bool:
        """Whether nothing new is taken."""
        return self.phase is not Phase.SERVING

    def begin(self, now: float, timeout_s: float | None = None) -> None:
        """Start to drain; a second call may only shorten the time."""
        deadline = now + (self._timeout_s if timeout_s is None else timeout_s)
        self._deadline = min(self._deadline, deadline)
        if self.phase is Phase.SERVING:
            self.phase = Phase.DRAINING

    def force(self, now: float) -> None:
        """Stop waiting."""
        self.forced = True
        self.begin(now, 0.0)

    def step(self, now: float, idle: bool, delivered: bool) -> Phase:
        """The phase now. ``idle``: no session is live; ``delivered``: nobody waits for a message."""
        if self.phase is Phase.DRAINING and (idle or now >= self._deadline):
            self.phase = Phase.CANCELLING
            self._deadline = now + _FAREWELL_S
        elif self.phase is Phase.CANCELLING and ((idle and delivered) or now >= self._deadline):
            self.phase = Phase.STOPPED
        return self.phase
