"""A session of the synchronous client."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from contextlib import closing
from types import TracebackType
from typing import TYPE_CHECKING, Self

from treadle._facts import SessionFacts
from treadle._link import Link, wait_until
from treadle._stream import Stream
from treadle.errors import CallTimeout
from treadle.events import Event, TextDelta

if TYPE_CHECKING:
    from treadle.client import Client


class Session(SessionFacts):
    """One generation that the node has accepted.

    Iterating yields text as it comes (each a non-empty ``str``), from the answer's beginning. Leaving the loop
    before the end, leaving the session's ``with`` block, or an exception in either (Ctrl-C too) cancels the
    session. Sessions may be read in any order and from any thread; one that nobody reads holds up no other.
    """

    def __init__(self, client: Client, link: Link, stream: Stream, idle_timeout: float | None) -> None:
        super().__init__(stream)
        self._client = client  # kept alive for as long as one of its sessions is
        self._link = link
        self._idle_timeout = idle_timeout
        self._changed = threading.Condition(link.lock)
        stream.on_change = self._changed.notify_all

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._leave()

    def __iter__(self) -> Iterator[str]:
        """Text deltas. Raises the session's error after the last one where it did not end as asked."""
        with closing(self._events(self._idle_timeout)) as events:
            for event in events:
                if isinstance(event, TextDelta) and event.text:
                    yield event.text
        if self._stream.end is not None:
            raise self._stream.end

    def events(self, *, idle_timeout: float | None = None) -> Iterator[Event]:
        """Everything that the session tells, ``Done`` last: how it ended is in there and is not raised.

        ``idle_timeout`` bounds the seconds between two events (CallTimeout). Raises Unavailable where the
        node goes away.
        """
        self._link.guard()
        return self._events(self._idle_timeout if idle_timeout is None else idle_timeout)

    def wait(self, timeout: float | None = None) -> str:
        """Wait for the end and return ``finish_reason``, whatever it is.

        Raises CallTimeout after ``timeout`` seconds (the session goes on) and Unavailable.
        """
        self._link.guard()
        try:
            with self._link.lock:
                ended = wait_until(self._changed, lambda: self._stream.ended, timeout)
        except BaseException:  # Ctrl-C
            self._leave()
            raise
        if not ended:
            raise CallTimeout(f"session {self.session_id} has not ended within {timeout} s")
        if self._stream.error is not None:
            raise self._stream.error
        assert self.finish_reason is not None
        return self.finish_reason

    def result(self, timeout: float | None = None) -> str:
        """Wait for the end and return the whole text.

        Raises what iterating raises: DeadlineExceeded, Cancelled, SessionFailed, … where the session did not
        end as asked, and CallTimeout after ``timeout`` seconds (the session goes on).
        """
        self.wait(timeout)
        if self._stream.end is not None:
            raise self._stream.end
        return self.text

    def cancel(self, *, timeout: float | None = None) -> bool:
        """End the session; True where it was still running. Idempotent.

        The end arrives as that of every session: ``finish_reason`` becomes ``cancelled``, and a loop over it
        ends without an error.
        """
        return self._client._cancel(self._stream, timeout)

    def _events(self, idle_timeout: float | None) -> Generator[Event, None, None]:
        self._link.guard()
        place = 0
        try:
            while (event := self._next(place, idle_timeout)) is not None:
                place += 1
                yield event
        finally:
            self._leave()
        if self._stream.error is not None:
            raise self._stream.error

    def _next(self, place: int, idle_timeout: float | None) -> Event | None:
        """Event number ``place``; None where the stream ended before it."""
        stream = self._stream
        if place >= len(stream.events):
            self._link.guard()
            with self._link.lock:
                come = wait_until(self._changed, lambda: len(stream.events) > place or stream.ended, idle_timeout)
            if not come:
                raise CallTimeout(f"session {self.session_id} sent nothing for {idle_timeout} s")
        return stream.events[place] if place < len(stream.events) else None

    def _leave(self) -> None:
        """Nobody listens any more: end the session if it has not ended."""
        if not self._stream.ended:
            self._link.cancel_soon(self._stream)
