"""The broker's end of the worker's socket: who the worker is, whether it lives, what it is sent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import recv_monitor_message

from treadle_shared.codec import decode_from_worker, encode
from treadle_shared.errors import MalformedMessage
from treadle_shared.limits import MAX_ANSWERS, MAX_FRAME_BYTES, PROTOCOL_MAJOR, PROTOCOL_MINOR
from treadle_shared.rundir import RuntimeDir
from treadle_shared.ticks import (
    FromWorker,
    Heartbeat,
    Probe,
    Tick,
    ToWorker,
    WorkerBye,
    WorkerHello,
    WorkerRefused,
    WorkerWelcome,
)

_POLLIN = int(zmq.POLLIN)  # operators of enums are slow
_BURST = 64  # after so many frames no message is read in a turn of the loop: a flood cannot hold it

_PATIENCE = 4  # silences; the socket's own clock runs on while this process sleeps, and must not end the connection
_DOUBT_S = 1.0  # how long after a connection's end the worker's is looked at
_LOOK_S = 0.05  # and how often: a worker that lives ignores a probe


@dataclass(slots=True)
class Peer:
    """The worker that was welcomed last, or whose heartbeats are heard while it loads."""

    identity: bytes
    worker_id: str
    pid: int
    heard_at: float
    phase: str = "loading"
    load: float = 0.0
    tick_age_s: float = 0.0
    hello: WorkerHello | None = None


class WorkerLink:
    """One worker at most. What it says comes out of ``receive``; ``lost_since`` tells when it fell silent."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], directory: RuntimeDir, broker_id: str, silence_s: float
    ) -> None:
        self.broker_id = broker_id
        self.malformed = 0
        self.strangers = 0
        self.welcomes = 0
        self._silence_s = silence_s
        self._doubt_until = 0.0
        self._next_look = 0.0
        self._peer: Peer | None = None
        self.socket = context.socket(zmq.ROUTER)
        self.socket.set(zmq.LINGER, 0)
        self.socket.set(zmq.ROUTER_MANDATORY, 1)
        self.socket.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self.socket.set(zmq.HEARTBEAT_IVL, 1000)
        self.socket.set(zmq.HEARTBEAT_TIMEOUT, int(_PATIENCE * 1000 * silence_s))
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self.socket.bind(directory.worker)

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """Sockets to poll for ``receive`` and ``hear_ends``."""
        return [self.socket, self.monitor]

    @property
    def peer(self) -> Peer | None:
        """The worker, loading or welcomed."""
        return self._peer

    @property
    def welcomed(self) -> Peer | None:
        """The worker that takes ticks."""
        return self._peer if self._peer is not None and self._peer.hello is not None else None

    def receive(self, now: float) -> Iterator[FromWorker]:
        """What the worker said, one by one: what is done with a message decides on the next. Messages of strangers
        are answered and dropped.
        """
        left = _BURST
        while left > 0:
            try:
                identity, *frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            left -= len(frames)
            for message in self._decoded(frames):
                if self._accepts(identity, message, now):
                    yield message
            if not _readable(self.socket):
                return

    def welcome(self, hello: WorkerHello) -> bool:
        """Take the worker that said hello; False where it has gone meanwhile."""
        assert self._peer is not None
        self._peer.hello = hello
        self._peer.phase = "ready"
        self.welcomes += 1
        return self._send(
            self._peer.identity,
            WorkerWelcome(
                major=PROTOCOL_MAJOR, minor=PROTOCOL_MINOR, broker_id=self.broker_id, worker_id=hello.worker_id
            ),
        )

    def refuse(self, reason: str, message: str) -> None:
        """Turn the worker that said hello away."""
        assert self._peer is not None
        self._send(self._peer.identity, WorkerRefused(reason=reason, message=message))
        self._peer = None

    def send(self, tick: Tick) -> bool:
        """Send a tick; False where the worker cannot be reached."""
        return self._peer is not None and self._send(self._peer.identity, tick)

    def forget(self) -> None:
        """The worker is lost: its next word makes it a stranger."""
        self._peer = None

    def excuse(self, seconds: float) -> None:
        """A silence of so many seconds was not the worker's."""
        if self._peer is not None:
            self._peer.heard_at += seconds

    def silent(self, now: float) -> bool:
        """Whether nothing was heard of the worker for too long."""
        return self._peer is not None and now - self._peer.heard_at > self._silence_s

    def hear_ends(self, now: float) -> None:
        """Take in that connections to this socket ended: one of them may have been the worker's."""
        while _readable(self.monitor):
            recv_monitor_message(self.monitor)
            self._doubt_until, self._next_look = now + _DOUBT_S, now

    def disconnected(self, now: float) -> bool:
        """Whether the worker's connection is among those that ended. That is told a moment before nothing can be sent
        on it any more, so it is looked for again for a while.
        """
        if self._peer is None or not self._next_look <= now <= self._doubt_until:
            return False
        self._next_look = now + _LOOK_S
        return not self._send(self._peer.identity, Probe(broker_id=self.broker_id))

    def close(self) -> None:
        """Close the socket and its monitor."""
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close()

    def _decoded(self, frames: list[bytes]) -> Iterator[FromWorker]:
        """What a worker sent together, but for what is not the protocol, which is counted."""
        if len(frames) > MAX_ANSWERS:
            self.malformed += 1
            return
        for frame in frames:
            try:
                yield decode_from_worker(frame)
            except MalformedMessage:
                self.malformed += 1

    def _accepts(self, identity: bytes, message: FromWorker, now: float) -> bool:
        """Whether the message comes from the worker, or from one that may become it."""
        peer = self._peer
        if peer is not None and peer.identity == identity:
            peer.heard_at = now
            if isinstance(message, Heartbeat):
                peer.tick_age_s = message.tick_age_s
            if isinstance(message, Heartbeat) and peer.hello is None:
                peer.phase, peer.load = message.phase, message.load
            return not (isinstance(message, WorkerHello) and peer.hello is not None)
        return self._accepts_stranger(identity, message, now)

    def _accepts_stranger(self, identity: bytes, message: FromWorker, now: float) -> bool:
        if isinstance(message, WorkerBye):
            return False
        if self._occupied(message):
            self.strangers += 1
            self._send(identity, WorkerRefused(reason="busy", message="another worker serves this node"))
            return False
        if isinstance(message, WorkerHello):
            self._peer = Peer(identity, message.worker_id, message.pid, now)
            return True
        if isinstance(message, Heartbeat) and message.phase != "ready" and self.welcomed is None:
            self._peer = Peer(identity, message.worker_id, message.pid, now, message.phase, message.load)
            return True
        if not isinstance(message, Heartbeat):  # a worker's heartbeat may overtake its hello
            self.strangers += 1
        self._send(identity, WorkerRefused(reason="unknown", message="say hello first"))
        return False

    def _occupied(self, message: FromWorker) -> bool:
        """Whether a welcomed worker lives and the stranger is not the same one, whose old connection is gone."""
        welcomed = self.welcomed
        if welcomed is None:
            return False
        same = getattr(message, "worker_id", "") == welcomed.worker_id
        return not same or self._send(welcomed.identity, Probe(broker_id=self.broker_id))

    def _send(self, identity: bytes, message: ToWorker) -> bool:
        try:
            self.socket.send_multipart([identity, encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            return False
        return True


def _readable(socket: zmq.Socket[bytes]) -> bool:
    """Whether a message waits. Asking costs a third of a read that fails."""
    events = socket.getsockopt(zmq.EVENTS)
    return isinstance(events, int) and bool(events & _POLLIN)
