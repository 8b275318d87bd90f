"""A look at a model's files before any process loads them: are they whole GGUF files of a model that generates text?

Reads the header alone, in plain Python: it costs a fraction of a second and needs no library. The format is ggml's
``docs/gguf.md``, versions 2 and 3.
"""

from __future__ import annotations

import mmap
import re
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from treadle_shared.errors import ModelError

MAGIC: Final = b"GGUF"

_SPLIT: Final = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})\.gguf$")
_VERSIONS: Final = (2, 3)
_ALIGNMENT: Final = 32  # of the data, where the file does not say
_MAX_DIMS: Final = 4
_MAX_KEY_BYTES: Final = 65_535
_STRING, _ARRAY = 8, 9
_VALUES: Final = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
"""Metadata types of a fixed size."""

# fmt: off
_BLOCKS: Final = {
    0: (1, 4), 1: (1, 2), 30: (1, 2), 24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8), 28: (1, 8),
    2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 20: (32, 18), 39: (32, 17),
    10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292),
    16: (256, 66), 17: (256, 74), 18: (256, 98), 19: (256, 50), 21: (256, 110), 22: (256, 82), 23: (256, 136),
    29: (256, 56), 34: (256, 54), 35: (256, 66),
}
# fmt: on
"""ggml's tensor types: weights in a block and bytes of one. Of others only the offset is known."""

Value = int | float | str | None


@dataclass(frozen=True, slots=True)
class ModelFile:
    """What a header tells: ``needed_bytes`` of the whole file, and the metadata that is a number or a text."""

    needed_bytes: int
    metadata: dict[str, Value]

    @property
    def architecture(self) -> str:
        """``general.architecture``, or empty."""
        return str(self.metadata.get("general.architecture") or "")


def model_files(path: Path) -> tuple[Path, ...]:
    """The file itself, or all parts where its name is ``…-00001-of-0000N.gguf``."""
    match = _SPLIT.match(path.name)
    if match is None:
        return (path,)
    total = int(match["total"])
    return tuple(path.with_name(f"{match['stem']}-{part:05d}-of-{match['total']}.gguf") for part in range(1, total + 1))


def check_model(path: Path) -> None:
    """Raises ModelError with one sentence that says what is wrong with a model's files."""
    for file in model_files(path):
        found = read_model_file(file)
        actual = file.stat().st_size
        if actual < found.needed_bytes:
            raise ModelError(f"{file}: is cut short: {actual} of {found.needed_bytes} bytes are there")
        _check_generates(file, found)


def read_model_file(path: Path) -> ModelFile:
    """The header of one file. Raises ModelError where it is missing, unreadable, no GGUF or damaged."""
    check_readable(path)
    try:
        with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Header(data).read()
    except (struct.error, _Damaged) as error:
        why = str(error) if isinstance(error, _Damaged) else "it ends in the middle"
        raise ModelError(f"{path}: the header is damaged or cut short: {why}") from None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {(error.strerror or str(error)).lower()}") from None


def check_readable(path: Path) -> None:
    """Raises ModelError unless it is a file that can be read and begins as a GGUF does."""
    try:
        info = path.stat()
        if stat.S_ISDIR(info.st_mode):
            raise ModelError(f"{path}: is a directory, not a model file")
        if not stat.S_ISREG(info.st_mode):  # opening a pipe would wait for ever
            raise ModelError(f"{path}: is not a regular file")
        with path.open("rb") as stream:
            magic = stream.read(len(MAGIC))
    except OSError as error:
        raise ModelError(f"{path}: {(error.strerror or str(error)).lower()}") from None
    if not magic:
        raise ModelError(f"{path}: is empty")
    if magic != MAGIC:
        raise ModelError(f"{path}: is not a GGUF file")


def _check_generates(path: Path, found: ModelFile) -> None:
    """Encoders say so: they pool their rows, or attend to later ones."""
    name = found.architecture
    pooling = found.metadata.get(f"{name}.pooling_type")
    if pooling not in (None, 0) or found.metadata.get(f"{name}.attention.causal") == 0:
        raise ModelError(f"{path}: is an embedding model ({name}); it cannot generate text")


class _Damaged(Exception):  # noqa: N818  (never leaves this module)
    """What cannot be in a GGUF file."""


class _Header:
    """A cursor over one file's bytes."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = len(MAGIC)

    def read(self) -> ModelFile:
        (version,) = self._take("<I")
        if version not in _VERSIONS:
            raise _Damaged(f"version {version} is none that is known")
        n_tensors, n_pairs = self._take("<QQ")
        metadata: dict[str, Value] = {}
        for _ in range(n_pairs):
            key = self._text(_MAX_KEY_BYTES)
            (kind,) = self._take("<I")
            metadata[key] = self._value(kind)
        ends = [self._tensor_end() for _ in range(n_tensors)]
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise _Damaged(f"an alignment of {alignment!r}")
        start = -(-self._at // alignment) * alignment
        return ModelFile(start + max(ends) if ends else self._at, metadata)

    def _take(self, layout: str) -> tuple[int, ...]:
        values = struct.unpack_from(layout, self._data, self._at)
        self._at += struct.calcsize(layout)
        return values

    def _skip(self, count: int) -> None:
        self._at += count
        if self._at > len(self._data):
            raise _Damaged("it ends in the middle")

    def _text(self, limit: int | None = None) -> str:
        (length,) = self._take("<Q")
        if limit is not None and length > limit:
            raise _Damaged(f"a key of {length} bytes")
        start = self._at
        self._skip(length)
        return self._data[start : self._at].decode("utf-8", "replace")

    def _value(self, kind: int) -> Value:
        if kind == _STRING:
            return self._text()
        if kind == _ARRAY:
            self._skip_array()
            return None
        return self._take(self._layout(kind))[0]

    def _skip_array(self) -> None:
        kind, count = self._take("<IQ")
        if kind != _STRING:
            self._skip(count * struct.calcsize(self._layout(kind)))
            return
        for _ in range(count):
            (length,) = struct.unpack_from("<Q", self._data, self._at)
            self._skip(8 + length)

    def _layout(self, kind: int) -> str:
        if kind not in _VALUES:
            raise _Damaged(f"a value of type {kind}")
        return _VALUES[kind]

    def _tensor_end(self) -> int:
        self._text(_MAX_KEY_BYTES)
        (n_dims,) = self._take("<I")
        if n_dims > _MAX_DIMS:
            raise _Damaged(f"a tensor of {n_dims} dimensions")
        weights = 1
        for length in self._take(f"<{n_dims}Q"):
            weights *= length
        kind, offset = self._take("<IQ")
        block, size = _BLOCKS.get(kind, (1, 0))
        return offset + weights // block * size
