"""The tick log on the disk: frames in an append-only file, with one predecessor.

A file begins with ``MAGIC``; each frame is the record's length and CRC-32 (two big-endian uint32) and the record as
msgpack. Frames are handed to the kernel as they come, so that they outlive a killed process; a machine that goes
down may lose the last ones. A frame that is not whole at the end of a file is its torn tail, and no damage.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final, Protocol
from zlib import crc32

import msgspec

from treadle_broker.tick_records import Opened, Record
from treadle_shared.errors import ConfigError, TreadleError

MAGIC: Final = b"treadle tick log\n"
MAX_RECORD_BYTES: Final = 4 << 20  # the largest, an opening with 4,096 epochs, has 0.2 MB
_HEAD: Final = struct.Struct(">II")
_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Record)


class NotATickLog(TreadleError):  # noqa: N818
    """The file cannot be read as a tick log."""


class Appender(Protocol):
    """Where frames go."""

    size: int
    """Bytes in the present file."""

    def append(self, data: bytes) -> None:
        """Write at the end, whole. Raises OSError."""

    def start_anew(self) -> None:
        """Make the file its own predecessor, and begin an empty one. Raises OSError."""

    def close(self) -> None:
        """Write nothing more."""


class TickFile:
    """``path``, for its owner alone, and ``path.1`` before it. What an earlier process left becomes the predecessor.

    Raises ConfigError where the file cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self.size = 0
        self._path = path
        self._descriptor = -1
        try:
            if path.exists() and not stat.S_ISREG(path.stat().st_mode):
                raise ConfigError("tick_log", f"{path}: is not a regular file")
            self.start_anew()
        except OSError as error:
            raise ConfigError("tick_log", f"{path}: {error.strerror or error}") from None

    def append(self, data: bytes) -> None:
        """One write(2), whole or an error. Raises OSError."""
        written = os.write(self._descriptor, data)
        self.size += written
        if written < len(data):
            raise OSError(None, "the disk took only part of a record")

    def start_anew(self) -> None:
        """Raises OSError."""
        self.close()
        if self._path.exists() and self._path.stat().st_size:
            self._path.replace(predecessor(self._path))
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.open(self._path, flags, 0o600)
        self.size = 0
        self.append(MAGIC)

    def close(self) -> None:
        """Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def predecessor(path: Path) -> Path:
    """Where a file goes when a new one begins."""
    return path.with_name(path.name + ".1")


def framed(record: Record) -> bytes:
    """One record as a frame."""
    body = _encoder.encode(record)
    return _HEAD.pack(len(body), crc32(body)) + body


class TickReader:
    """Reads one file's records in order.

    ``torn_bytes`` and ``damaged`` are known once every record was read: bytes of an unfinished frame at the end, and
    whether a frame before the end is not what was written, after which nothing can be read.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self.torn_bytes = 0
        self.damaged = False
        self._stream = stream

    def opened(self) -> Opened:
        """The first record. Raises NotATickLog."""
        if self._stream.read(len(MAGIC)) != MAGIC:
            raise NotATickLog("is not a tick log")
        first = next(self.records(), None)
        if not isinstance(first, Opened):
            raise NotATickLog("does not begin with the opening of a tick log")
        return first

    def records(self) -> Iterator[Record]:
        """The records from here on."""
        while True:
            start = self._stream.tell()
            body = self._body()
            record = _decoded(body) if body else None
            if record is None:
                self._judge_end(start, whole=bool(body))
                return
            yield record

    def _body(self) -> bytes | None:
        """The next frame's record, or None where there is no whole frame."""
        head = self._stream.read(_HEAD.size)
        if len(head) < _HEAD.size:
            return None
        length, checksum = _HEAD.unpack(head)
        if not 0 < length <= MAX_RECORD_BYTES:
            return None
        body = self._stream.read(length)
        return body if len(body) == length and crc32(body) == checksum else None

    def _judge_end(self, start: int, *, whole: bool) -> None:
        """What could not be read is a torn tail where nothing but zeros follows: blocks that never reached the disk."""
        stopped = self._stream.tell()
        rest = self._stream.read()
        self.damaged = whole or any(rest)
        self.torn_bytes = 0 if self.damaged else stopped + len(rest) - start


def _decoded(body: bytes) -> Record | None:
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, ConfigError, RecursionError):
        return None
