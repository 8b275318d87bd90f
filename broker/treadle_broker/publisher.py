"""Telemetry out: an XPUB socket with the last value on subscription, and a replay of what was missed.

Each topic counts its own messages from 0, so that a subscriber of any set of topics sees its gaps. A stalled
subscriber costs nothing: its messages are dropped by the socket, and it can fetch them from the replay.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterator
from typing import Any, Final

import msgspec
import zmq

from treadle_shared.codec import unpack
from treadle_shared.errors import MalformedMessage
from treadle_shared.rundir import RuntimeDir

TOPICS: Final = ("snapshot", "tick", "session", "admission", "worker")
_LAST_VALUE: Final = ("snapshot", "worker")
_SEND_HWM = 1000  # messages a slow subscriber may be behind before it gets gaps
_REPLAY_BATCH = 1000  # events in one replay answer
_MAX_QUERY_BYTES = 256  # of a subscription or a replay query: the longest topic is far shorter
_encoder: Final = msgspec.msgpack.Encoder()
_BURST = 32  # subscriptions or queries taken in one turn of the loop: a flood cannot hold it


class _Topic:
    """``wanted``: somebody has subscribed to it. Until then nothing is sent; from then on the socket knows best who
    still listens, since the end of a subscription can be told by one who never had it.
    """

    def __init__(self, name: str, keep: int) -> None:
        self.name = name.encode()
        self.tells_last = name in _LAST_VALUE
        self.wanted = False
        self.next = 0
        self.kept: deque[tuple[int, bytes]] = deque(maxlen=keep)

    def between(self, first: int, last: int) -> list[tuple[int, bytes]]:
        """What is kept of a range, at most one batch; costs the batch, not what is kept."""
        if not self.kept:
            return []
        oldest = self.kept[0][0]
        start, end = max(first - oldest, 0), min(last - oldest + 1, len(self.kept))
        return [self.kept[place] for place in range(start, min(end, start + _REPLAY_BATCH))]

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
        self._out.set(zmq.MAXMSGSIZE, _MAX_QUERY_BYTES)
        self._out.set(zmq.XPUB_VERBOSE, 1)
        self._out.bind(directory.telemetry)
        self._replay = context.socket(zmq.ROUTER)
        self._replay.set(zmq.LINGER, 0)
        self._replay.set(zmq.MAXMSGSIZE, _MAX_QUERY_BYTES)
        self._replay.bind(directory.replay)
        self.bad_queries = 0
        self.bad_subscriptions = 0

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """Sockets to poll for ``serve``."""
        return [self._out, self._replay]

    def publish(self, topic: str, event: dict[str, Any]) -> None:
        """Send one event to whoever listens, and keep it for the replay."""
        kept = self._topics[topic]
        body = _encoder.encode({"boot_id": self._boot_id, **event})
        sequence, kept.next = kept.next, kept.next + 1
        kept.kept.append((sequence, body))
        if kept.wanted:
            self._send(kept.frames(sequence, body))

    def serve(self, ready: Container[Any]) -> None:
        """Where a socket is ``ready``: answer subscriptions with the last value, replay queries with what is kept."""
        if self._out in ready:
            for frames in _burst(self._out):
                self._subscribed(frames)
        if self._replay in ready:
            for query in _burst(self._replay):
                self._answer(query)

    def close(self) -> None:
        """Close both sockets."""
        self._out.close()
        self._replay.close()

    def _subscribed(self, frames: list[bytes]) -> None:
        """1 and a prefix subscribes, 0 ends that (the socket sees to it); anything else means nothing."""
        kind = frames[0][:1]
        if len(frames) != 1 or kind not in (b"\x00", b"\x01"):
            self.bad_subscriptions += 1
        elif kind == b"\x01":
            self._greet(frames[0][1:])

    def _greet(self, prefix: bytes) -> None:
        for topic in self._topics.values():
            if topic.name.startswith(prefix):
                topic.wanted = True
                if topic.tells_last and topic.kept:
                    self._send(topic.frames(*topic.kept[-1]))

    def _send(self, frames: list[bytes]) -> None:
        try:
            self._out.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:  # no subscriber can take it; the replay has it
            return

    def _answer(self, query: list[bytes]) -> None:
        """``[identity, msgpack [topic, first, last]]`` gets ``[identity, b"replay", topic, sequence, map, …]``."""
        try:
            name, first, last = msgspec.convert(unpack(query[-1]), tuple[str, int, int])
            topic = self._topics[name]
        except (MalformedMessage, msgspec.ValidationError, KeyError):
            self.bad_queries += 1
            return
        frames = [query[0], b"replay"]
        for sequence, body in topic.between(first, last):
            frames += topic.frames(sequence, body)
        try:
            self._replay.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            self.bad_queries += 1


def _burst(socket: zmq.Socket[bytes]) -> Iterator[list[bytes]]:
    for _ in range(_BURST):
        try:
            yield socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
