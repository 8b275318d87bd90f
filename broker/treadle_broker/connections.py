"""Client connections: who is there, what they still have to be sent, and who has gone.

A client that cannot take more is simply behind: its messages wait in order, its streams wait in their logs, and
nobody else notices. A client is gone when its connection is; only that starts its sessions' orphan timeout.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

import zmq

from treadle_broker.stream import Stream
from treadle_shared.calls import ToClient
from treadle_shared.codec import encode

_MAX_OUTBOX = 10_000  # answers waiting for a client that does not read; beyond it, further ones are dropped
_MAX_MESSAGES = 1024  # messages in one frame: a frame stays far below the codec's bound
_FRAME_ITEMS = 8192  # tokens and alternatives in one frame: a backlog goes out in pieces that a client can decode
_RETRY_S = 0.05  # how soon a full peer is tried again
_PROBE_S = 2.0  # how often a silent client with live sessions is looked for
_IDLE_PROBE_S = 30.0  # how often one without any is


@dataclass(slots=True, eq=False)
class Connection:
    """One client on one socket. ``outbox`` holds answers, ``news`` the streams that have something for it."""

    identity: bytes
    socket: zmq.Socket[bytes]
    admin: bool
    name: str = ""
    outbox: list[ToClient] = field(default_factory=list)
    streams: dict[Stream, None] = field(default_factory=dict)
    news: dict[Stream, None] = field(default_factory=dict)
    blocked_until: float = 0.0
    last_sent: float = 0.0
    dropped: int = 0

    @property
    def address(self) -> tuple[bool, bytes]:
        """Its socket and its identity there."""
        return self.admin, self.identity

    @property
    def scope(self) -> str:
        """The name under which its session ids live; unique while the broker runs."""
        return scope_of(*self.address)

    @property
    def unread_tokens(self) -> int:
        """Tokens of its streams that it has not been sent."""
        return sum(stream.unread for stream in self.streams)

    def say(self, message: ToClient) -> None:
        """Queue an answer."""
        if len(self.outbox) >= _MAX_OUTBOX:
            self.dropped += 1
        else:
            self.outbox.append(message)


class Connections:
    """Every open connection, by socket and identity."""

    def __init__(self) -> None:
        self._open: dict[tuple[bool, bytes], Connection] = {}
        self._eager: dict[Connection, None] = {}
        self._next_probe = 0.0

    def __len__(self) -> int:
        return len(self._open)

    def get(self, admin: bool, identity: bytes) -> Connection | None:
        """A connection that said HELLO."""
        return self._open.get((admin, identity))

    def open(self, connection: Connection) -> None:
        """A client said HELLO."""
        self._open[connection.address] = connection

    def is_open(self, connection: Connection) -> bool:
        """Whether it has neither gone nor said goodbye."""
        return self._open.get(connection.address) is connection

    def reader(self, stream: Stream) -> Connection | None:
        """Who reads a stream."""
        return None if stream.reader is None else self._open.get(stream.reader)

    def touch(self, connection: Connection) -> None:
        """It has something to be sent."""
        self._eager[connection] = None

    def notice(self, stream: Stream) -> None:
        """A stream has something new for its reader, if it has one."""
        reader = self.reader(stream)
        if reader is not None and stream in reader.streams:
            reader.news[stream] = None
            self._eager[reader] = None

    def attach(self, connection: Connection, stream: Stream, have_tokens: int) -> None:
        """``connection`` reads the stream from here on, after its first ``have_tokens`` tokens."""
        before = self.reader(stream)
        if before is not None:
            before.streams.pop(stream, None)
            before.news.pop(stream, None)
        stream.reader = connection.address
        stream.sent = min(have_tokens, stream.emitted)
        stream.done_sent = False
        connection.streams[stream] = None
        if stream.has_news:
            self.notice(stream)

    def close(self, connection: Connection) -> list[Stream]:
        """Forget a connection; returns the streams that nobody reads now."""
        self._open.pop(connection.address, None)
        self._eager.pop(connection, None)
        unread = list(connection.streams)
        connection.streams.clear()
        connection.news.clear()
        for stream in unread:
            stream.reader = None
        return unread

    def flush(self, now: float, frames: int = sys.maxsize) -> list[Connection]:
        """Send what can be sent, at most so many frames to each; returns the connections that turned out to be gone."""
        if not self._eager:
            return []
        return [connection for connection in list(self._eager) if not self._flush_one(connection, now, frames)]

    def probe(self, now: float) -> list[Connection]:
        """Look for clients that have been sent nothing for a while; returns those that are gone."""
        if now < self._next_probe:
            return []
        self._next_probe = now + _PROBE_S / 2
        due = [c for c in self._open.values() if now - c.last_sent > (_PROBE_S if c.streams else _IDLE_PROBE_S)]
        return [connection for connection in due if not _send(connection, [], now)]

    def blocked(self) -> bool:
        """Whether somebody waits for room in its socket."""
        return bool(self._eager)

    def all(self) -> Iterator[Connection]:
        """Every open connection."""
        return iter(self._open.values())

    def _flush_one(self, connection: Connection, now: float, frames: int) -> bool:
        for _ in range(frames):
            if connection.blocked_until > now:
                break
            messages, cursors, rest = _next_frame(connection)
            if not messages:
                self._eager.pop(connection, None)
                return True
            if not _send(connection, messages, now):
                return False
            if connection.blocked_until > now:
                return True
            _commit(connection, cursors, rest)
        return True


def scope_of(admin: bool, identity: bytes) -> str:
    """Identities are unique on their socket only."""
    return f"{'control' if admin else 'client'}-{identity.hex()}"


def _next_frame(connection: Connection) -> tuple[list[ToClient], list[tuple[Stream, int, bool]], int]:
    """Messages for one frame, the cursors once it is sent, and how many of the outbox it holds."""
    taken = min(len(connection.outbox), _MAX_MESSAGES)
    messages = connection.outbox[:taken]
    cursors: list[tuple[Stream, int, bool]] = []
    size = 0
    for stream in connection.news:
        if len(messages) >= _MAX_MESSAGES or size >= _FRAME_ITEMS:
            break
        end = stream.sent
        if stream.unread:
            delta, end = stream.next_delta()
            messages.append(delta)
            size += stream.items(delta)
        finished = stream.done is not None and end == stream.parts
        if finished and stream.done is not None:
            messages.append(stream.done)
        cursors.append((stream, end, finished))
    return messages, cursors, taken


def _commit(connection: Connection, cursors: list[tuple[Stream, int, bool]], taken: int) -> None:
    del connection.outbox[:taken]
    for stream, end, finished in cursors:
        stream.sent = end
        if finished:
            stream.done_sent = True
            del connection.streams[stream]
        if not stream.has_news:
            del connection.news[stream]


def _send(connection: Connection, messages: list[ToClient], now: float) -> bool:
    """Send a frame; False where the client is gone. A full peer is blocked for a moment."""
    try:
        connection.socket.send_multipart([connection.identity, encode(messages)], zmq.NOBLOCK)
    except zmq.Again:
        connection.blocked_until = now + _RETRY_S
    except zmq.ZMQError as error:
        if error.errno != zmq.EHOSTUNREACH:
            raise
        return False
    connection.last_sent = now
    return True
