"""Waking the tasks that wait for a change."""

from __future__ import annotations

import asyncio


class Signal:
    """Wakes every task that waits for it. Unlike an event it does not stay set: whoever waits has looked just before,
    and in one event loop nothing comes between.
    """

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []

    def give(self) -> None:
        """Something has changed."""
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def next(self) -> asyncio.Future[None]:
        """To be awaited at once: done when the signal is next given."""
        if self._waiting:  # those whose tasks were cancelled, or gave up, are waited for no more
            self._waiting = [future for future in self._waiting if not future.done()]
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        return future
