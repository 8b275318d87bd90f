"""When a refused client should come back.

A full queue opens one place whenever a session ends. The estimate lays the remaining work out over the active
slots, in decode ticks, and gives the i-th request that was refused the i-th place that will open: those told the same
moment would only refuse each other again. A promise lapses when its time has come, when somebody gets in, and when the
node is empty.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

_MARGIN = 1.5  # told times are this much longer than estimated: who comes early is refused, who comes late is not
_FLOOR_S = 0.05  # below this a client would only poll
_MAX_PROMISES = 10_000  # places that can be promised at once; beyond it everyone is told the last one
_MAX_PROMISES_A_CLIENT = 64  # places one client can hold: whoever polls only moves its own turn
_SMOOTHING = 0.1  # weight of the newest tick in the running mean
_DEFAULT_TICK_S = 0.05  # before anything was measured


class RetryEstimator:
    """Measures tick time and hands out places in time."""

    def __init__(self) -> None:
        self._tick_s: float | None = None
        self._promises: deque[tuple[float, str]] = deque(maxlen=_MAX_PROMISES)
        self._held: Counter[str] = Counter()

    @property
    def tick_s(self) -> float:
        """The running mean of a tick's duration, in seconds."""
        return self._tick_s if self._tick_s is not None else _DEFAULT_TICK_S

    def seed(self, tick_s: float) -> None:
        """Take a warm-up's measurement until a tick says better."""
        if self._tick_s is None and tick_s > 0:
            self._tick_s = tick_s

    @property
    def measured_tick_s(self) -> float | None:
        """The running mean, None before anything was measured."""
        return self._tick_s

    def remember(self, tick_s: float | None) -> None:
        """Go on from another estimator's mean."""
        self._tick_s = tick_s

    def observe(self, tick_s: float) -> None:
        """One more tick took ``tick_s`` seconds."""
        known = self._tick_s
        self._tick_s = tick_s if known is None else known + _SMOOTHING * (tick_s - known)

    def taken(self) -> None:
        """Somebody got in: the first promised place is no longer one."""
        if self._promises:
            self._lapse()

    def emptied(self) -> None:
        """Nobody waits and nobody runs: every place is open."""
        self._promises.clear()
        self._held.clear()

    def promise(self, client: str, remaining: Sequence[int], mean_job: float, now: float) -> float:
        """Seconds until the next unpromised place opens; a client that holds many is told its last one again.

        ``remaining``: ticks each active session still needs; ``mean_job``: ticks of a typical waiting session.
        """
        while self._promises and self._promises[0][0] <= now:
            self._lapse()
        if self._held[client] >= _MAX_PROMISES_A_CLIENT:
            return max(_FLOOR_S, next(at for at, who in reversed(self._promises) if who == client) - now)
        return self._next_place(client, remaining, mean_job, now)

    def opens_in(self, remaining: Sequence[int], mean_job: float, index: int) -> float:
        """Seconds until the ``index``-th place from now opens, promised or not; see ``promise``."""
        return _opening(sorted(remaining) or [1], mean_job, index) * self.tick_s

    def _lapse(self) -> None:
        _, client = self._promises.popleft()
        self._held[client] -= 1
        if not self._held[client]:
            del self._held[client]

    def _next_place(self, client: str, remaining: Sequence[int], mean_job: float, now: float) -> float:
        ticks = _opening(sorted(remaining) or [1], mean_job, len(self._promises))
        wait = max(_FLOOR_S, ticks * self.tick_s * _MARGIN)
        if self._promises:
            wait = max(wait, self._promises[-1][0] - now)
        if len(self._promises) < _MAX_PROMISES:
            self._promises.append((now + wait, client))
            self._held[client] += 1
        return wait


def _opening(remaining: Sequence[int], mean_job: float, index: int) -> float:
    """Ticks until the ``index``-th session ends when every freed slot takes on another ``mean_job`` ticks."""
    rounds, lane = divmod(index, len(remaining))
    return remaining[lane] + rounds * max(mean_job, 1.0)
