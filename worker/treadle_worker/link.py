"""The worker's socket to its broker."""

from __future__ import annotations

import select
from collections.abc import Iterator
from threading import Lock
from typing import Final

import msgspec
import zmq

from treadle_shared.codec import decode_to_worker, encode
from treadle_shared.config import NodeConfig
from treadle_shared.errors import MalformedMessage
from treadle_shared.limits import MAX_FRAME_BYTES
from treadle_shared.rundir import RuntimeDir
from treadle_shared.ticks import ToWorker
from treadle_worker.bell import Bell
from treadle_worker.throttle import Throttle

_POLLIN: Final = int(zmq.POLLIN)  # operators of enums are slow
_NOBLOCK: Final = int(zmq.NOBLOCK)
_EVENTS: Final = int(zmq.EVENTS)
_BURST: Final = 64  # messages read in one turn: a flood cannot keep results from leaving
_RECONNECT_MS: Final = 100  # how soon a restarted broker is found
_RECONNECT_MAX_MS: Final = 1000  # back-off bound while there is none
_GOODBYE_MS: Final = 500  # how long the last messages may take to leave
_QUEUE: Final = 1000  # messages either way: minutes of heartbeats, more ticks than are ever in flight


class BrokerLink:
    """A DEALER that finds its broker by itself, again and again. Nothing is queued while there is no broker.

    Any thread may ``send``; one thread, the listener, calls ``receive``, ``wait`` and ``reopen``. The socket passes
    between them under a lock, as libzmq asks (zmq_socket(3)). Nobody holds it to wait: the listener waits on the
    socket's descriptor, which tells of news once (ZMQ_FD in zmq_getsockopt(3)), so a sender that may have taken that
    word rings the bell.
    """

    def __init__(self, directory: RuntimeDir, config: NodeConfig) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._endpoint = directory.worker
        self._silence_ms = max(int(1000 * config.worker_silence_s), 1)
        self._lock = Lock()
        self._bell = Bell()
        self.malformed = Throttle()
        self._connect()

    def send(self, *messages: msgspec.Struct) -> bool:
        """Send messages that arrive together; False where no broker takes them."""
        frames = [encode(message) for message in messages]
        with self._lock:
            try:
                self._socket.send_multipart(frames, _NOBLOCK)
            except zmq.Again:
                return False
            finally:
                if self._has_news():
                    self._bell.ring()
        return True

    def receive(self) -> Iterator[ToWorker]:
        """What has arrived, up to a bound; what is not the protocol is counted and dropped."""
        self._bell.hush()
        for _ in range(_BURST):
            with self._lock:
                frames = self._next()
            if frames is None:
                return
            message = self._decoded(frames)
            if message is not None:
                yield message
        self._bell.ring()

    def drop_waiting(self) -> None:
        """Drop what has arrived, up to all that can wait."""
        for _ in range(2 * _QUEUE):
            with self._lock:
                if self._next() is None:
                    return

    def wait(self, seconds: float | None) -> None:
        """Return when there may be something to receive, when somebody woke the listener, or after ``seconds``."""
        self._poll.poll(None if seconds is None else 1000 * max(seconds, 0.0))

    def wake(self) -> None:
        """Have the listener look around."""
        self._bell.ring()

    def reopen(self) -> None:
        """Start over on a new connection, which a broker cannot mistake for the old one."""
        with self._lock:
            self._socket.close(linger=0)
            self._connect()

    def close(self) -> None:
        """Close; returns when the last messages have left, or their time is over. The bell is left to the listener."""
        with self._lock:
            self._socket.close(linger=_GOODBYE_MS)
        self._context.term()

    def _next(self) -> list[bytes] | None:
        if not self._has_news():
            return None
        try:
            return self._socket.recv_multipart(_NOBLOCK)
        except zmq.Again:  # what waited went with its connection
            return None

    def _has_news(self) -> bool:
        """Whether a message waits. Asking costs a third of a read that fails."""
        events = self._socket.getsockopt(_EVENTS)
        return isinstance(events, int) and bool(events & _POLLIN)

    def _decoded(self, frames: list[bytes]) -> ToWorker | None:
        try:
            return decode_to_worker(frames[0] if len(frames) == 1 else b"")  # several frames are no message
        except MalformedMessage:
            self.malformed.count()
            return None

    def _connect(self) -> None:
        socket = self._context.socket(zmq.DEALER)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.IMMEDIATE, 1)
        socket.set(zmq.RECONNECT_IVL, _RECONNECT_MS)
        socket.set(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        socket.set(zmq.HEARTBEAT_IVL, max(self._silence_ms // 3, 1))
        socket.set(zmq.HEARTBEAT_TIMEOUT, self._silence_ms)
        socket.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        socket.set(zmq.SNDHWM, _QUEUE)
        socket.set(zmq.RCVHWM, _QUEUE)
        socket.connect(self._endpoint)
        self._socket = socket
        self._poll = select.poll()
        self._poll.register(socket, select.POLLIN)
        self._poll.register(self._bell, select.POLLIN)
