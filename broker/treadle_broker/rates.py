"""Rates over a sliding window of an injected clock."""

from __future__ import annotations

from collections import deque

WINDOW_S = 10.0
_BUCKET_S = 0.5  # resolution of the window's edge; bounds the buckets to 21


class RateMeter:
    """Events a second over the last ``WINDOW_S`` seconds (cut to whole buckets), or since the first event if less."""

    def __init__(self) -> None:
        self._buckets: deque[tuple[int, int]] = deque()
        self._started: float | None = None

    def add(self, count: int, now: float) -> None:
        """``count`` events happened at ``now``."""
        if count <= 0:
            return
        if self._started is None:
            self._started = now
        bucket = int(now // _BUCKET_S)
        if self._buckets and self._buckets[-1][0] >= bucket:
            last, total = self._buckets.pop()
            self._buckets.append((last, total + count))
        else:
            self._buckets.append((bucket, count))
        self._trim(now)

    def rate(self, now: float) -> float:
        """Events a second."""
        first = self._trim(now)
        if self._started is None or not self._buckets:
            return 0.0
        span = now - max(self._started, first * _BUCKET_S)
        return sum(count for _, count in self._buckets) / max(span, _BUCKET_S)

    def _trim(self, now: float) -> int:
        """Drop what left the window; the number of the first bucket that lies in it whole."""
        first = int((now - WINDOW_S) // _BUCKET_S) + 1
        while self._buckets and self._buckets[0][0] < first:
            self._buckets.popleft()
        return first
