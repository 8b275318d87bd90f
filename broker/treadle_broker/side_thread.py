"""One helper thread for work that would hold up the loop: long texts."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

MAX_PENDING = 64  # texts waiting for the thread: each is below the frame bound, so memory is too


class SideThread:
    """Runs calls one after the other; ``fileno`` becomes readable when some have returned."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenize")
        self._pending: list[tuple[Future[Any], Callable[[Future[Any]], None]]] = []
        self._wake_reader, self._wake_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    @property
    def full(self) -> bool:
        """Whether nothing more is taken for now."""
        return len(self._pending) >= MAX_PENDING

    def fileno(self) -> int:
        """A descriptor to poll for readability."""
        return self._wake_reader

    def start(self, call: Callable[[], Any], then: Callable[[Future[Any]], None]) -> None:
        """Run ``call`` beside the loop; ``then`` gets its future from ``settle``, in the loop's thread."""
        future = self._pool.submit(call)
        self._pending.append((future, then))
        future.add_done_callback(self._wake)

    def settle(self) -> None:
        """Hand out what has returned, in the order it was started."""
        try:
            os.read(self._wake_reader, 4096)
        except BlockingIOError:
            return
        while self._pending and self._pending[0][0].done():
            future, then = self._pending.pop(0)
            then(future)

    def close(self) -> None:
        """Drop what waits; a call that runs is waited for."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        os.close(self._wake_reader)
        os.close(self._wake_writer)

    def _wake(self, _: Future[Any]) -> None:
        try:
            os.write(self._wake_writer, b"\0")
        except BlockingIOError:  # a full pipe wakes the loop already
            return
