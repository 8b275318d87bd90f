"""The synchronous client's connection: one I/O thread owns the socket, any number of threads ask and wait.

Everything shared lies in the core and is used under one lock. What may run inside a garbage collection (the
end of a forgotten generator, of a forgotten client) takes no lock: it leaves a note for the I/O thread.
"""

from __future__ import annotations

import atexit
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Final

import zmq

from treadle._birthplace import Birthplace
from treadle._call import Call
from treadle._core import Core, State
from treadle._stream import Stream
from treadle._wire import LINGER_MS, Wire
from treadle.errors import CallTimeout, Unavailable, again
from treadle_shared.errors import MalformedMessage, TreadleError

JOIN_TIMEOUT_S: Final = 2.0  # the I/O thread ends within its linger; a longer wait would hang the caller's exit
CLOSE_GRACE_S: Final = 0.5  # a broker confirms a cancel within a turn of its loop; GOODBYE covers the rest
RECONNECT_DELAY_S: Final = 0.05  # between a lost connection and the next, so that a flapping peer is no busy loop
_SIGNAL_S: Final = 0.5  # the longest that a signal may go unnoticed by a waiting thread


class Link:
    """One connection to a broker, kept up for as long as the client lives.

    ``where`` says in errors which node is meant.
    """

    def __init__(self, endpoint: str, where: str, resume_timeout_s: float | None = None) -> None:
        self.lock = threading.Lock()
        self.core = Core(resume_timeout_s=resume_timeout_s)
        self._state_changed = threading.Condition(self.lock)
        self.core.on_state = self._state_changed.notify_all
        self._endpoint = endpoint
        self._where = where
        self._birthplace = Birthplace()
        self._closing = False
        self._to_cancel: deque[Stream] = deque()  # bounded by the sessions that are not over
        self._context = zmq.Context[zmq.Socket[bytes]]()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._wake_fd)  # not earlier: a late caller may still write to it
        self._thread = threading.Thread(target=self._run, name="treadle-client", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a program that just ends says goodbye too

    # ---- for callers, in any thread

    def guard(self) -> None:
        """Raise ForkedClient in a process that did not make this connection."""
        self._birthplace.guard()

    def wait_open(self, timeout_s: float) -> None:
        """Wait for the broker's welcome. Raises Unavailable, or VersionMismatch."""
        with self.lock:
            wait_until(self._state_changed, lambda: self.core.state is not State.CONNECTING, timeout_s)
            if self.core.state is State.CONNECTING:
                raise Unavailable(unreachable(self._where, timeout_s))
            if self.core.state is not State.OPEN:
                raise again(self.core.why)

    def call(self, question: Callable[[Core], Call], timeout_s: float | None) -> Call:
        """Ask and wait for the answer. Raises its error, or CallTimeout; either abandons a submission."""
        self.guard()
        changed = threading.Condition(self.lock)
        with self.lock:
            call = question(self.core)
            call.on_change = changed.notify_all
            self._wake()
            try:
                settled = wait_until(changed, lambda: call.settled, timeout_s)
            except BaseException:  # Ctrl-C
                self._abandon(call)
                raise
            if not settled:
                self._abandon(call)
                raise CallTimeout(f"{self._where}: no answer within {timeout_s} s")
        if call.error is not None:
            raise call.error
        return call

    def cancel_soon(self, stream: Stream) -> None:
        """End a session without waiting; takes no lock."""
        stream.cancelled_here = True
        if self._birthplace.here and not self._closing:
            self._to_cancel.append(stream)
            self._wake()

    def close_soon(self) -> None:
        """Begin to close; takes no lock, and does nothing in a forked child."""
        if self._birthplace.here and not self._closing:
            self._closing = True
            self._wake()

    def close(self) -> None:
        """Cancel every session, say goodbye, and end the I/O thread."""
        self.close_soon()
        if self._birthplace.here and threading.current_thread() is not self._thread:
            self._thread.join(JOIN_TIMEOUT_S)

    def _abandon(self, call: Call) -> None:
        self.core.abandon(call)
        self._wake()

    def _wake(self) -> None:
        os.eventfd_write(self._wake_fd, 1)

    # ---- the I/O thread

    def _run(self) -> None:
        try:
            while not self._closing:
                self._connection()
        except Exception as error:
            self._lose(Unavailable(f"{self._where}: the client's I/O thread failed: {error!r}"))
            raise
        finally:
            self._tear_down()

    def _connection(self) -> None:
        """One connection, from HELLO to its loss or the client's end."""
        wire = Wire(self._context, self._endpoint)
        linger_ms = 0
        try:
            with self.lock:
                self.core.connect()
            if self._serve(wire, lambda: self._closing):
                self._await_ends(wire)
                linger_ms = self._goodbye(wire)
        except MalformedMessage as error:
            self._lose(error)
        finally:
            wire.close(linger_ms)
        if not self._closing:
            time.sleep(RECONNECT_DELAY_S)

    def _serve(self, wire: Wire, over: Callable[[], bool], timeout_s: float = math.inf) -> bool:
        """Move frames until ``over()`` or the timeout; False where the connection was lost instead."""
        poller = zmq.Poller()
        poller.register(wire.monitor, zmq.POLLIN)
        poller.register(self._wake_fd, zmq.POLLIN)
        deadline = time.monotonic() + timeout_s
        while not over() and time.monotonic() < deadline:
            again_s = self._tend()
            flushed = self._send(wire)
            poller.register(wire.socket, zmq.POLLIN if flushed else zmq.POLLIN | zmq.POLLOUT)
            wait_s = min(deadline - time.monotonic(), math.inf if again_s is None else again_s)
            ready = dict(poller.poll(None if wait_s == math.inf else 1 + int(wait_s * 1000)))
            if self._wake_fd in ready:
                self._drain_wake()
            gone = wire.monitor in ready and wire.peer_gone()
            if wire.socket in ready:
                self._receive(wire)
            if gone:
                self._receive_rest(wire)
                self._lose(Unavailable(f"{self._where}: the broker went away"))
                return False
        return True

    def _await_ends(self, wire: Wire) -> None:
        """Cancel what runs and hear its end, if that comes soon."""
        with self.lock:
            self.core.cancel_all()
        self._serve(wire, lambda: self.core.live == 0, CLOSE_GRACE_S)

    def _tend(self) -> float | None:
        with self.lock:
            return self.core.tend()

    def _send(self, wire: Wire) -> bool:
        """Send what waits; False where the socket has no room."""
        with self.lock:
            while self._to_cancel:
                self.core.cancel(self._to_cancel.popleft())
            while (frame := self.core.next_frame()) is not None:
                if not wire.send(frame):
                    return False
                self.core.sent()
        return True

    def _receive(self, wire: Wire) -> None:
        for frame in wire.receive():
            with self.lock:
                self.core.receive(frame)

    def _receive_rest(self, wire: Wire) -> None:
        """What came before the connection broke is still good."""
        while wire.readable:
            self._receive(wire)

    def _goodbye(self, wire: Wire) -> int:
        """Close the core and send what it says last; the time it may take to leave, in milliseconds."""
        with self.lock:
            self.core.close()
            frame = self.core.next_frame()
        return LINGER_MS if frame is not None and wire.send(frame) else 0

    def _lose(self, error: TreadleError) -> None:
        with self.lock:
            self.core.lose(error)

    def _drain_wake(self) -> None:
        try:
            os.eventfd_read(self._wake_fd)
        except BlockingIOError:
            return

    def _tear_down(self) -> None:
        self._closing = True
        with self.lock:
            self.core.close()
        self._context.term()
        atexit.unregister(self.close)


def unreachable(where: str, timeout_s: float) -> str:
    """The sentence for a node that does not answer."""
    return (
        f"{where}: no broker answered within {timeout_s:g} s; start a node with "
        f"`treadle serve --runtime-dir {where}`, or name another runtime directory"
    )


def wait_until(changed: threading.Condition, done: Callable[[], bool], timeout_s: float | None) -> bool:
    """Whether ``done`` came true within ``timeout_s`` seconds (None: for ever). The condition's lock is held.

    In short waits: Ctrl-C that another thread receives, or that comes just before this one falls asleep, wakes nobody.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while not done():
        left = _SIGNAL_S if deadline is None else min(deadline - time.monotonic(), _SIGNAL_S)
        if left <= 0:
            return False
        changed.wait(left)
    return True
