"""Waking the tasks that wait for a change."""

from __future__ import annotations

import asyncio
from typing import Final

_FEW: Final = 8


class Signal:
    """Wakes every task that waits for it. Unlike an event it does not stay set: whoever waits has looked just before,
    and in one event loop nothing comes between.
    """

    __slots__ = ("_full", "_loop", "_waiting")

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []
        self._full = _FEW
        self._loop: asyncio.AbstractEventLoop | None = None

    def give(self) -> None:
        """Something has changed."""
        waiting, self._waiting, self._full = self._waiting, [], _FEW
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def next(self) -> asyncio.Future[None]:
        """To be awaited at once: done when the signal is next given. Raises RuntimeError in a second event loop."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._bind(loop)
        if len(self._waiting) >= self._full:
            self._forget_those_who_gave_up()
        future = loop.create_future()
        self._waiting.append(future)
        return future

    def _bind(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._loop is not None:
            raise RuntimeError("an asynchronous client belongs to the event loop that opened it")
        self._loop = loop

    def _forget_those_who_gave_up(self) -> None:
        """Their tasks were cancelled, or had waited long enough. Only where as many have come as were left the last
        time, so that a look at all of them costs each a constant.
        """
        self._waiting = [future for future in self._waiting if not future.done()]
        self._full = 2 * len(self._waiting) + _FEW
