"""Telemetry out: an XPUB socket with the last value on subscription, and a replay of what was missed.

Each topic counts its own messages from 0, so that a subscriber of any set of topics sees its gaps. A stalled
subscriber costs nothing: its messages are dropped by the socket, and it can fetch them from the replay.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final

import msgpack
import zmq

from treadle_shared.rundir import RuntimeDir

TOPICS: Final = ("snapshot", "tick", "session", "admission", "worker")
_LAST_VALUE: Final = ("snapshot", "worker")
_SEND_HWM = 1000  # messages a slow subscriber may be behind before it gets gaps
_REPLAY_BATCH = 1000  # events in one replay answer
_MAX_QUERY_BYTES = 256


class _Topic:
    def __init__(self, name: str, keep: int) -> None:
        self.name = name.encode()
        self.next = 0
        self.kept: deque[tuple[int, bytes]] = deque(maxlen=keep)

    def frames(self, sequence: int, body: bytes) -> list[bytes]:
        return [self.name, sequence.to_bytes(8, "big"), body]


class Publisher:
    """Publishes JSON-safe maps under a topic; every map carries ``boot_id``."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], directory: RuntimeDir, boot_id: str, keep: int) -> None:
        self._boot_id = boot_id
        self._topics = {name: _Topic(name, keep) for name in TOPICS}
        self._out = context.socket(zmq.XPUB)
        self._out.set(zmq.SNDHWM, _SEND_HWM)
        self._out.set(zmq.LINGER, 0)
        self._out.set(zmq.XPUB_VERBOSE, 1)
        self._out.bind(directory.telemetry)
        self._replay = context.socket(zmq.ROUTER)
        self._replay.set(zmq.LINGER, 0)
        self._replay.set(zmq.MAXMSGSIZE, _MAX_QUERY_BYTES)
        self._replay.bind(directory.replay)
        self.bad_queries = 0

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """Sockets to poll for ``serve``."""
        return [self._out, self._replay]

    def publish(self, topic: str, event: dict[str, Any]) -> None:
        """Send one event to whoever listens, and keep it for the replay."""
        kept = self._topics[topic]
        body = msgpack.packb({"boot_id": self._boot_id, **event})
        sequence, kept.next = kept.next, kept.next + 1
        kept.kept.append((sequence, body))
        self._send(kept.frames(sequence, body))

    def serve(self) -> None:
        """Answer subscriptions with the last value, and replay queries with what is kept."""
        while (frame := _receive(self._out)) is not None:
            if frame[0][:1] == b"\x01":
                self._greet(frame[0][1:])
        while (query := _receive(self._replay)) is not None:
            self._answer(query)

    def close(self) -> None:
        """Close both sockets."""
        self._out.close()
        self._replay.close()

    def _greet(self, prefix: bytes) -> None:
        for name in _LAST_VALUE:
            topic = self._topics[name]
            if topic.name.startswith(prefix) and topic.kept:
                self._send(topic.frames(*topic.kept[-1]))

    def _send(self, frames: list[bytes]) -> None:
        try:
            self._out.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:  # no subscriber can take it; the replay has it
            return

    def _answer(self, query: list[bytes]) -> None:
        """``[identity, msgpack [topic, first, last]]`` gets ``[identity, b"replay", topic, sequence, map, …]``."""
        try:
            name, first, last = msgpack.unpackb(query[-1], max_array_len=3)
            topic = self._topics[name]
            wanted = [item for item in topic.kept if int(first) <= item[0] <= int(last)][:_REPLAY_BATCH]
        except (ValueError, TypeError, KeyError, msgpack.exceptions.UnpackException):
            self.bad_queries += 1
            return
        frames = [query[0], b"replay"]
        for sequence, body in wanted:
            frames += topic.frames(sequence, body)
        try:
            self._replay.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            self.bad_queries += 1


def _receive(socket: zmq.Socket[bytes]) -> list[bytes] | None:
    try:
        return socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None
