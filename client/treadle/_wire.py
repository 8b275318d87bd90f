"""The socket seam: one DEALER socket to the broker and the monitor that tells when the peer is gone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import zmq
from zmq.utils.monitor import recv_monitor_message

from treadle_shared.limits import MAX_FRAME_BYTES

HEARTBEAT_IVL_MS: Final = 500  # how often ZMTP asks whether the broker's process runs
HEARTBEAT_TIMEOUT_MS: Final = 4_500  # a stopped broker is found within 5 s; a dead one at once, by its socket
HEARTBEAT_TTL_MS: Final = 5_000  # how soon the broker may take this client for gone when it falls silent
RECONNECT_MS: Final = 50  # how often a connection is tried where no broker listens yet
RECONNECT_MAX_MS: Final = 500  # and at most how far apart, so that a returning broker is found in half a second
RECEIVE_HWM: Final = 0  # the broker bounds what a client is sent; dropping here would tear streams
SEND_HWM: Final = 1_000  # frames in the socket; more wait in the core
LINGER_MS: Final = 250  # time for GOODBYE to leave when the client closes
MAX_FRAMES_A_TURN: Final = 256  # then questions of other threads get their turn

_POLLIN: Final = int(zmq.POLLIN)  # operators of enums are slow
_GONE: Final = zmq.Event.DISCONNECTED | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.HANDSHAKE_FAILED_PROTOCOL


class Wire:
    """A connection attempt: never reused once the peer is gone, so nothing stale is sent to the next broker."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self.socket = context.socket(zmq.DEALER)
        for option, value in _OPTIONS:
            self.socket.setsockopt(option, value)
        self.monitor = self.socket.get_monitor_socket(_GONE)
        self.socket.connect(endpoint)

    def receive(self) -> Iterator[bytes]:
        """The frames that are there, up to MAX_FRAMES_A_TURN."""
        for _ in range(MAX_FRAMES_A_TURN):
            if not self.readable:
                return
            try:
                yield self.socket.recv(zmq.DONTWAIT)
            except zmq.Again:
                return

    def send(self, frame: bytes) -> bool:
        """Hand one frame over; False where the socket has no room now."""
        try:
            self.socket.send(frame, zmq.DONTWAIT)
        except zmq.Again:
            return False
        return True

    def peer_gone(self) -> bool:
        """Whether the monitor says that the connection ended since it was last asked."""
        gone = False
        while _readable(self.monitor):
            recv_monitor_message(self.monitor, zmq.DONTWAIT)
            gone = True
        return gone

    @property
    def readable(self) -> bool:
        """Whether a frame waits; asking also re-arms the edge-triggered descriptor."""
        return _readable(self.socket)

    def close(self, linger_ms: int = 0) -> None:
        """Close both sockets."""
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=linger_ms)


def _readable(socket: zmq.Socket[bytes]) -> bool:
    """Whether a message waits. Asking costs a third of a read that fails."""
    events = socket.getsockopt(zmq.EVENTS)
    return isinstance(events, int) and bool(events & _POLLIN)


_OPTIONS: Final = (
    (zmq.HEARTBEAT_IVL, HEARTBEAT_IVL_MS),
    (zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS),
    (zmq.HEARTBEAT_TTL, HEARTBEAT_TTL_MS),
    (zmq.RECONNECT_IVL, RECONNECT_MS),
    (zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS),
    (zmq.RCVHWM, RECEIVE_HWM),
    (zmq.SNDHWM, SEND_HWM),
    (zmq.MAXMSGSIZE, MAX_FRAME_BYTES),
    (zmq.LINGER, 0),
)
