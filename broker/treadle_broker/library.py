"""Every stream the broker keeps: running ones, and finished ones until their time is up."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from treadle_broker.session import SessionKey
from treadle_broker.stream import Stream

MAX_FINISHED = 4096  # finished logs kept at once; the oldest goes first, whatever its time to live


class StreamLibrary:
    """Streams by session and by secret."""

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._streams: dict[SessionKey, Stream] = {}
        self._by_secret: dict[bytes, Stream] = {}
        self._finished: OrderedDict[SessionKey, Stream] = OrderedDict()

    def __len__(self) -> int:
        return len(self._streams)

    def add(self, stream: Stream) -> None:
        """A session was accepted."""
        self._streams[stream.key] = stream
        self._by_secret[stream.secret] = stream

    def get(self, key: SessionKey) -> Stream:
        """The stream of a live session. Raises KeyError."""
        return self._streams[key]

    def by_secret(self, secret: bytes | None) -> Stream | None:
        """The stream that this secret owns."""
        return None if secret is None else self._by_secret.get(secret)

    def named(self, session_id: str) -> Iterator[Stream]:
        """Live streams of exactly this id, of any client. Costs the number of streams."""
        return (s for s in self._streams.values() if s.key.session_id == session_id and s.done is None)

    def finish(self, stream: Stream) -> None:
        """The session ended; its log stays for a while."""
        self._finished[stream.key] = stream
        while len(self._finished) > MAX_FINISHED:
            self._drop(next(iter(self._finished.values())))

    def expire(self, now: float) -> list[Stream]:
        """Drop the logs whose time is up; returns them."""
        gone = []
        for stream in self._finished.values():
            if stream.ended_at is None or stream.ended_at + self._ttl_s > now:
                break
            gone.append(stream)
        for stream in gone:
            self._drop(stream)
        return gone

    def _drop(self, stream: Stream) -> None:
        del self._finished[stream.key]
        del self._streams[stream.key]
        if self._by_secret.get(stream.secret) is stream:
            del self._by_secret[stream.secret]
