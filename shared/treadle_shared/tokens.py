"""Token arrays on the wire: little-endian int32."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable

from treadle_shared.errors import MalformedMessage


def pack_tokens(tokens: Iterable[int]) -> bytes:
    """Token ids as little-endian int32 bytes, shape (n,). Raises OverflowError outside int32."""
    packed = tokens if isinstance(tokens, array) and tokens.typecode == "i" else array("i", tokens)
    return packed.tobytes() if sys.byteorder == "little" else _swapped(packed).tobytes()


def unpack_tokens(data: bytes) -> array[int]:
    """The reverse of ``pack_tokens``. Raises MalformedMessage where the length is not a multiple of 4."""
    if len(data) % 4:
        raise MalformedMessage(f"a token array of {len(data)} bytes is not a whole number of int32", "tokens")
    tokens = array("i")
    tokens.frombytes(data)
    return tokens if sys.byteorder == "little" else _swapped(tokens)


def _swapped(tokens: array[int]) -> array[int]:
    copy = array("i", tokens)
    copy.byteswap()
    return copy
