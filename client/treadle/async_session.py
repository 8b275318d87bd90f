"""A session of the asynchronous client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from types import TracebackType
from typing import TYPE_CHECKING, Self

from treadle._async_link import AsyncLink
from treadle._facts import SessionFacts
from treadle._signal import Signal
from treadle._stream import Stream
from treadle.errors import CallTimeout
from treadle.events import Event, TextDelta

if TYPE_CHECKING:
    from treadle.async_client import AsyncClient


class AsyncSession(SessionFacts):
    """One generation that the node has accepted; the asynchronous twin of Session.

    ``async for`` yields text as it comes. Leaving the session's ``async with`` block before the end, an
    exception in it, and cancelling the task that iterates cancel the session at once; leaving a bare
    ``async for`` cancels it when the event loop finalizes the iterator.
    """

    def __init__(self, client: AsyncClient, link: AsyncLink, stream: Stream, idle_timeout: float | None) -> None:
        super().__init__(stream)
        self._client = client
        self._link = link
        self._idle_timeout = idle_timeout
        self._changed = Signal()
        stream.on_change = self._changed.give

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._leave()

    async def __aiter__(self) -> AsyncIterator[str]:
        """Text deltas. Raises the session's error after the last one where it did not end as asked."""
        async with aclosing(self._events(self._idle_timeout)) as events:
            async for event in events:
                if isinstance(event, TextDelta) and event.text:
                    yield event.text
        if self._stream.end is not None:
            raise self._stream.end

    def events(self, *, idle_timeout: float | None = None) -> AsyncIterator[Event]:
        """Everything that the session tells, ``Done`` last: how it ended is in there and is not raised.

        ``idle_timeout`` bounds the seconds between two events (CallTimeout). Raises Unavailable where the
        node goes away.
        """
        self._link.guard()
        return self._events(self._idle_timeout if idle_timeout is None else idle_timeout)

    async def wait(self, timeout: float | None = None) -> str:
        """Wait for the end and return ``finish_reason``, whatever it is.

        Raises CallTimeout after ``timeout`` seconds (the session goes on) and Unavailable.
        """
        try:
            ended = await self._link.wait_for(self._changed, lambda: self.ended, timeout)
        except asyncio.CancelledError:
            self._leave()
            raise
        if not ended:
            raise CallTimeout(f"session {self.session_id} has not ended within {timeout} s")
        if self._stream.error is not None:
            raise self._stream.error
        assert self.finish_reason is not None
        return self.finish_reason

    async def result(self, timeout: float | None = None) -> str:
        """Wait for the end and return the whole text.

        Raises what iterating raises: DeadlineExceeded, Cancelled, SessionFailed, … where the session did not
        end as asked, and CallTimeout after ``timeout`` seconds (the session goes on).
        """
        await self.wait(timeout)
        if self._stream.end is not None:
            raise self._stream.end
        return self.text

    async def cancel(self, *, timeout: float | None = None) -> bool:
        """End the session; True where it was still running. Idempotent.

        The end arrives as that of every session: ``finish_reason`` becomes ``cancelled``, and a loop over it
        ends without an error.
        """
        return await self._client._cancel(self._stream, timeout)

    async def _events(self, idle_timeout: float | None) -> AsyncGenerator[Event, None]:
        stream, place = self._stream, 0
        events = stream.events  # it only grows
        try:
            while True:
                while place < len(events):
                    place += 1
                    yield events[place - 1]
                if stream.ended:
                    break
                if idle_timeout is None:  # every token is waited for here; a timer would cost more than the rest
                    self._link.guard()
                    await self._changed.next()
                else:
                    await self._in_time(place, idle_timeout)
        finally:
            self._leave()
        if stream.error is not None:
            raise stream.error

    async def _in_time(self, place: int, idle_timeout: float) -> None:
        """Wait for event number ``place``, or the end. Raises CallTimeout."""
        events = self._stream.events
        if not await self._link.wait_for(self._changed, lambda: len(events) > place or self.ended, idle_timeout):
            raise CallTimeout(f"session {self.session_id} sent nothing for {idle_timeout} s")

    def _leave(self) -> None:
        """Nobody listens any more: end the session if it has not ended."""
        if not self.ended:
            self._link.cancel_soon(self._stream)
