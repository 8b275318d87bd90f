"""Small GGUF files, whole or not, for tests of what is made of them."""

from __future__ import annotations

import struct
from collections.abc import Mapping

Value = str | int | bool | list[str]


def gguf(metadata: Mapping[str, Value], tensors: Mapping[str, int] | None = None) -> bytes:
    """A file with float32 vectors of the given lengths, in order."""
    tensors = tensors or {}
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(_text(key) + _value(value) for key, value in metadata.items())
    offset = 0
    for name, length in tensors.items():
        head += _text(name) + struct.pack("<IQIQ", 1, length, 0, offset)
        offset += -(-4 * length // 32) * 32
    return head + bytes(-len(head) % 32) + bytes(offset)


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: Value) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_text, value))
