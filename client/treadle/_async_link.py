"""The asynchronous client's connection: the event loop watches the socket's descriptors, no thread is needed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq

from treadle._birthplace import Birthplace
from treadle._call import Call
from treadle._core import Core, State
from treadle._link import CLOSE_GRACE_S, RECONNECT_DELAY_S, unreachable
from treadle._signal import Signal
from treadle._stream import Stream
from treadle._wire import LINGER_MS, Wire
from treadle.errors import CallTimeout, Unavailable, again
from treadle_shared.errors import MalformedMessage, TreadleError


class AsyncLink:
    """One connection to a broker, in the event loop that opened it. Not for use from other threads."""

    def __init__(self, endpoint: str, where: str, resume_timeout_s: float | None = None) -> None:
        self.core = Core(resume_timeout_s=resume_timeout_s)
        self._state_changed = Signal()
        self.core.on_state = self._state_changed.give
        self._endpoint = endpoint
        self._where = where
        self._birthplace = Birthplace()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._wire: Wire | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._tend_at: asyncio.TimerHandle | None = None
        self._pump_due = False

    # ---- for callers, in the loop

    def guard(self) -> None:
        """Raise ForkedClient in a process that did not make this connection."""
        self._birthplace.guard()

    async def open(self, timeout_s: float) -> None:
        """Connect and wait for the broker's welcome. Raises Unavailable, or VersionMismatch."""
        self.guard()
        if self._loop is None and self.core.state is not State.CLOSED:
            self._loop = asyncio.get_running_loop()
            self._context = zmq.Context()
            self._connect()
        if not await self.wait_for(self._state_changed, lambda: self.core.state is not State.CONNECTING, timeout_s):
            raise Unavailable(unreachable(self._where, timeout_s))
        if self.core.state is not State.OPEN:
            raise again(self.core.why)

    async def call(self, question: Callable[[Core], Call], timeout_s: float | None) -> Call:
        """Ask and wait for the answer. Raises its error, or CallTimeout; either abandons a submission."""
        self.guard()
        changed = Signal()
        call = question(self.core)
        call.on_change = changed.give
        self._pump_soon()
        try:
            settled = await self.wait_for(changed, lambda: call.settled, timeout_s)
        except BaseException:  # the waiting task was cancelled
            self._abandon(call)
            raise
        if not settled:
            self._abandon(call)
            raise CallTimeout(f"{self._where}: no answer within {timeout_s} s")
        if call.error is not None:
            raise call.error
        return call

    async def wait_for(self, changed: Signal, done: Callable[[], bool], timeout_s: float | None) -> bool:
        """Wait until ``done()``, which is asked whenever ``changed`` is given; False after ``timeout_s`` seconds."""
        self.guard()
        try:
            async with asyncio.timeout(timeout_s):
                while not done():
                    await changed.next()
        except TimeoutError:
            return done()
        return True

    def cancel_soon(self, stream: Stream) -> None:
        """End a session without waiting."""
        if self._birthplace.here:
            self.core.cancel(stream)
            self._pump_soon()

    async def close(self) -> None:
        """Cancel every session, hear their ends if they come soon, say goodbye, and close the socket."""
        if not self._birthplace.here:
            return
        try:
            await self._await_ends()
        finally:
            self._close()

    async def _await_ends(self) -> None:
        self.core.cancel_all()
        self._pump_soon()
        ends = Signal()
        self.core.on_end = ends.give
        await self.wait_for(ends, lambda: self.core.live == 0, CLOSE_GRACE_S)

    def _close(self) -> None:
        if self.core.state is State.CLOSED:
            return
        self.core.close()
        frame = self.core.next_frame()
        for timer in (self._retry, self._tend_at):
            if timer is not None:
                timer.cancel()
        if self._wire is not None:
            sent = frame is not None and self._wire.send(frame)
            self._disconnect(LINGER_MS if sent else 0)
        if self._context is not None:
            self._context.term()

    def _abandon(self, call: Call) -> None:
        self.core.abandon(call)
        self._pump_soon()

    # ---- the socket

    def _connect(self) -> None:
        assert self._loop is not None
        assert self._context is not None
        self._retry = None
        self._wire = Wire(self._context, self._endpoint)
        self._loop.add_reader(self._wire.socket.fileno(), self._pump)
        self._loop.add_reader(self._wire.monitor.fileno(), self._look_for_peer)
        self.core.connect()
        self._pump_soon()
        self._loop.call_soon(self._look_for_peer)  # the descriptor tells only what comes after a first look

    def _disconnect(self, linger_ms: int = 0) -> None:
        assert self._wire is not None
        assert self._loop is not None
        for socket in (self._wire.socket, self._wire.monitor):
            self._loop.remove_reader(socket.fileno())
        self._wire.close(linger_ms)
        self._wire = None

    def _pump_soon(self) -> None:
        if not self._pump_due and self._loop is not None and self._wire is not None:
            self._pump_due = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Move what can be moved. The descriptor is edge-triggered: what is left must bring another turn."""
        self._pump_due = False
        if self._wire is None:
            return
        try:
            self._receive(self._wire)
            self._tend()
            blocked = not self._send(self._wire)
        except MalformedMessage as error:
            self._lose(error)
            return
        if blocked or self._wire.readable:
            self._pump_soon()

    def _look_for_peer(self) -> None:
        if self._wire is not None and self._wire.peer_gone():
            self._lose_after_rest(self._wire)

    def _receive(self, wire: Wire) -> None:
        for frame in wire.receive():
            self.core.receive(frame)

    def _tend(self) -> None:
        """Look after lost sessions, now and for as long as there are some."""
        again_s = self.core.tend()
        if again_s is not None and self._tend_at is None and self._loop is not None:
            self._tend_at = self._loop.call_later(again_s, self._tend_again)

    def _tend_again(self) -> None:
        self._tend_at = None
        self._tend()
        self._pump_soon()

    def _send(self, wire: Wire) -> bool:
        while (frame := self.core.next_frame()) is not None:
            if not wire.send(frame):
                return False
            self.core.sent()
        return True

    def _lose_after_rest(self, wire: Wire) -> None:
        """What came before the connection broke is still good."""
        error: TreadleError = Unavailable(f"{self._where}: the broker went away")
        try:
            while wire.readable:
                self._receive(wire)
        except MalformedMessage as malformed:
            error = malformed
        self._lose(error)

    def _lose(self, error: TreadleError) -> None:
        assert self._loop is not None
        self._disconnect()
        self.core.lose(error)
        self._retry = self._loop.call_later(RECONNECT_DELAY_S, self._connect)
