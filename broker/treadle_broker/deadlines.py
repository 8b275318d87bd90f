"""Deadlines of live sessions, earliest first."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import count

from treadle_broker.session import Session, State

_SLACK = 64  # entries of ended sessions that may stay before the heap is rebuilt: amortises the rebuild


class Deadlines:
    """A heap of (time, session); entries of ended sessions are dropped as they surface or outnumber the live."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, bool, Session]] = []
        self._order = count()

    def watch(self, session: Session) -> None:
        """Watch a new session's two deadlines."""
        for at, of_queue in ((session.job.queue_deadline, True), (session.job.deadline, False)):
            if at is not None:
                heapq.heappush(self._heap, (at, next(self._order), of_queue, session))

    def next(self) -> float | None:
        """When the next one is due."""
        while self._heap and not _pending(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def due(self, now: float) -> Iterator[tuple[Session, str]]:
        """Sessions whose time is up, with which bound it was."""
        while (at := self.next()) is not None and at <= now:
            _, _, of_queue, session = heapq.heappop(self._heap)
            yield session, "queue_timeout" if of_queue else "deadline"

    def compact(self, live: int) -> None:
        """Drop entries of ended sessions once they outnumber the ``live`` ones."""
        if len(self._heap) > 2 * (2 * live + _SLACK):
            self._heap = [entry for entry in self._heap if _pending(entry)]
            heapq.heapify(self._heap)


def _pending(entry: tuple[float, int, bool, Session]) -> bool:
    _, _, of_queue, session = entry
    return session.state is State.QUEUED if of_queue else session.live
