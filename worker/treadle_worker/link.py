"""The worker's socket to its broker."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec
import zmq

from treadle_shared.codec import decode_to_worker, encode
from treadle_shared.config import NodeConfig
from treadle_shared.errors import MalformedMessage
from treadle_shared.limits import MAX_FRAME_BYTES
from treadle_shared.ticks import ToWorker
from treadle_worker.throttle import Throttle

_POLLIN: Final = int(zmq.POLLIN)  # operators of enums are slow
_BURST: Final = 64  # frames read in one turn: a flood cannot keep heartbeats from leaving
_RECONNECT_MS: Final = 100  # how soon a restarted broker is found
_RECONNECT_MAX_MS: Final = 1000  # back-off bound while there is none
_GOODBYE_MS: Final = 500  # how long the last messages may take to leave
_QUEUE: Final = 1000  # messages either way: minutes of heartbeats, more ticks than are ever in flight


class BrokerLink:
    """A DEALER that finds its broker by itself, again and again. Nothing is queued while there is no broker."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, config: NodeConfig) -> None:
        self._context = context
        self._endpoint = endpoint
        self._config = config
        self.malformed = Throttle()
        self.socket = self._connected()

    def send(self, message: msgspec.Struct | bytes) -> bool:
        """Send a message, or one encoded already; False where no broker takes it."""
        try:
            self.socket.send(message if isinstance(message, bytes) else encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self) -> Iterator[ToWorker]:
        """What has arrived, up to a bound; what is not the protocol is counted and dropped."""
        for _ in range(_BURST):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            message = self._decoded(frames)
            if message is not None:
                yield message
            if not _readable(self.socket):
                return

    def reopen(self) -> None:
        """Start over on a new connection, which a broker cannot mistake for the old one."""
        self.socket.close(linger=0)
        self.socket = self._connected()

    def close(self) -> None:
        """Close, giving the last messages a moment to leave."""
        self.socket.close(linger=_GOODBYE_MS)

    def _decoded(self, frames: list[bytes]) -> ToWorker | None:
        try:
            return decode_to_worker(frames[0] if len(frames) == 1 else b"")  # several frames are no message
        except MalformedMessage:
            self.malformed.count()
            return None

    def _connected(self) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        silence_ms = max(int(1000 * self._config.worker_silence_s), 1)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.IMMEDIATE, 1)
        socket.set(zmq.RECONNECT_IVL, _RECONNECT_MS)
        socket.set(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        socket.set(zmq.HEARTBEAT_IVL, max(silence_ms // 3, 1))
        socket.set(zmq.HEARTBEAT_TIMEOUT, silence_ms)
        socket.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        socket.set(zmq.SNDHWM, _QUEUE)
        socket.set(zmq.RCVHWM, _QUEUE)
        socket.connect(self._endpoint)
        return socket


def _readable(socket: zmq.Socket[bytes]) -> bool:
    """Whether a message waits. Asking costs a third of a read that fails."""
    events = socket.getsockopt(zmq.EVENTS)
    return isinstance(events, int) and bool(events & _POLLIN)
