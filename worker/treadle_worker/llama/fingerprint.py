"""The recipe fingerprint: a stable name for everything that can change a token."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

_DIGEST_BYTES: Final = 16
_BLOCK: Final = 1 << 20
_WHOLE_LIMIT: Final = 1 << 30  # bytes; a file up to here is hashed whole, in about a second and a half
_SAMPLES: Final = 512  # blocks of a larger file: the header whole for all but giant vocabularies, weights sampled


def hash_files(files: Iterable[Path]) -> str:
    """A digest of model files as 32 hex characters.

    A file of at most 1 GiB is read whole. A larger one contributes its size and 512 blocks of 1 MiB: the
    first 16, the last 16, and the rest spread evenly, which tells models and quantisations apart but would
    miss a change of single weights between the blocks.
    """
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for file in files:
        size = file.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with file.open("rb") as stream:
            for offset in block_offsets(size):
                stream.seek(offset)
                digest.update(stream.read(_BLOCK))  # releases the GIL
    return digest.hexdigest()


def block_offsets(size: int) -> Iterator[int]:
    """Where the hashed blocks of a file of ``size`` bytes start, in order."""
    total = -(-size // _BLOCK)
    if size <= _WHOLE_LIMIT:
        yield from (block * _BLOCK for block in range(total))
        return
    edge = 16
    inner = _SAMPLES - 2 * edge
    yield from (block * _BLOCK for block in range(edge))
    span = total - 2 * edge
    yield from ((edge + block * span // inner) * _BLOCK for block in range(inner))
    yield from (block * _BLOCK for block in range(total - edge, total))


def fingerprint(parts: Iterable[tuple[str, object]]) -> str:
    """One digest over named facts, as 32 hex characters."""
    text = "\n".join(f"{name}={value}" for name, value in parts)
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest()
