"""An HTTP/1.1 response of server-sent events, parsed as its bytes come, without I/O."""

from __future__ import annotations

from typing import Final

MAX_HEAD: Final = 16_384  # bytes of status line and headers; servers of this kind send some hundreds
MAX_EVENT: Final = 1 << 20  # bytes of one event; the largest, a final one with all its settings, takes kilobytes

_HEAD_END: Final = b"\r\n\r\n"
_DATA: Final = b"data:"


class MalformedResponseError(ValueError):
    """The bytes are no such response."""


class HttpResponse:
    """Takes bytes; gives the status and the data of each event.

    ``status`` is None before the head has come. ``body`` collects what is no event stream (an error's JSON).
    ``complete``: the body ended as its headers said it would.
    """

    def __init__(self) -> None:
        self.status: int | None = None
        self.complete = False
        self.body = bytearray()
        self._buffer = bytearray()
        self._lines = bytearray()
        self._chunked = False
        self._left: int | None = None  # bytes of the body still to come; None where the connection's end ends it
        self._events = False

    def feed(self, data: bytes) -> list[bytes]:
        """The data of every event that these bytes complete. Raises MalformedResponseError."""
        self._buffer += data
        if self.status is None and not self._take_head():
            return []
        content = self._unchunked() if self._chunked else self._counted()
        if not self._events:
            self.body += content
            return []
        return self._split(content)

    def _take_head(self) -> bool:
        end = self._buffer.find(_HEAD_END)
        if end < 0:
            if len(self._buffer) > MAX_HEAD:
                raise MalformedResponseError("no end of the headers")
            return False
        lines = bytes(self._buffer[:end]).split(b"\r\n")
        del self._buffer[: end + len(_HEAD_END)]
        headers = dict(_header(line) for line in lines[1:])
        self._chunked = headers.get(b"transfer-encoding", b"") == b"chunked"
        self._events = headers.get(b"content-type", b"").startswith(b"text/event-stream")
        self._left = int(headers[b"content-length"]) if b"content-length" in headers else None
        try:
            self.status = int(lines[0].split(b" ", 2)[1])
        except (IndexError, ValueError):
            raise MalformedResponseError("no status line") from None
        return True

    def _counted(self) -> bytes:
        content = bytes(self._buffer)
        self._buffer.clear()
        if self._left is not None:
            self._left -= len(content)
            self.complete = self._left <= 0
        return content

    def _unchunked(self) -> bytes:
        """The content of every whole chunk."""
        content = bytearray()
        while not self.complete:
            end = self._buffer.find(b"\r\n")
            if end < 0:
                break
            size = _chunk_size(bytes(self._buffer[:end]))
            if len(self._buffer) < end + 2 + size + 2:
                break
            content += self._buffer[end + 2 : end + 2 + size]
            del self._buffer[: end + 2 + size + 2]
            self.complete = size == 0
        return bytes(content)

    def _split(self, content: bytes) -> list[bytes]:
        self._lines = (self._lines + content).replace(b"\r\n", b"\n")
        if len(self._lines) > MAX_EVENT:
            raise MalformedResponseError("an event without an end")
        *events, rest = bytes(self._lines).split(b"\n\n")
        self._lines = bytearray(rest)
        return [data for event in events if (data := _data(event))]


def _header(line: bytes) -> tuple[bytes, bytes]:
    name, _, value = line.partition(b":")
    return name.strip().lower(), value.strip().lower()


def _chunk_size(line: bytes) -> int:
    try:
        return int(line.split(b";", 1)[0], 16)
    except ValueError:
        raise MalformedResponseError("no chunk size") from None


def _data(event: bytes) -> bytes:
    """The joined data lines of an event; comments and other fields say nothing here."""
    lines = [line[len(_DATA) :].lstrip(b" ") for line in event.split(b"\n") if line.startswith(_DATA)]
    return b"\n".join(lines)
