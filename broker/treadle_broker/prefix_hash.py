"""A sequence's chain of block digests, by which the scheduler knows its beginning without knowing a token."""

from __future__ import annotations

import hashlib
import secrets
import sys
from array import array
from collections.abc import Callable
from typing import Final, Literal

from treadle_broker.session import DIGEST_BYTES
from treadle_shared.budget import PREFIX_BLOCK_TOKENS
from treadle_shared.tokens import pack_tokens

PrefixSharing = Literal["client", "node", "off"]

_NEVER: Final = sys.maxsize


class Chain:
    """Digests of one sequence as it grows, each over everything before it too. ``first`` stands for whose it is, and is
    empty where nothing may be shared.
    """

    def __init__(self, first: bytes, block: int, digest: Callable[[bytes], bytes]) -> None:
        self._last = first
        self._block = block
        self._digest = digest
        self._done = 0  # tokens
        self._next = block if first else _NEVER

    def grow(self, sequence: array[int]) -> bytes:
        """Digests of the blocks that have become whole since the last call, one after the other; see ``Job.prefix``."""
        if len(sequence) < self._next:
            return b""
        digests = []
        while len(sequence) >= self._next:
            self._last = self._digest(self._last + pack_tokens(sequence[self._done : self._next]))
            digests.append(self._last)
            self._done = self._next
            self._next += self._block
        return b"".join(digests)


class PrefixHasher:
    """Digests under a key that lives and dies with this object, so that nobody can guess a prompt from them.

    ``sharing``: ``node`` lets every request start from every other's sequence, ``client`` those of one client alone,
    ``off`` none; a request's own salt parts them further. May be called from any thread.
    """

    def __init__(self, sharing: PrefixSharing, block: int = PREFIX_BLOCK_TOKENS) -> None:
        self._sharing = sharing
        self._block = block
        self._key = secrets.token_bytes(32)

    def chain(self, client: str, salt: str) -> Chain:
        """The chain of a new sequence."""
        first = b"" if self._sharing == "off" else self._tenant(client, salt)
        return Chain(first, self._block, self._digest)

    def _tenant(self, client: str, salt: str) -> bytes:
        whose = client.encode("utf-8", "surrogatepass") if self._sharing == "client" else b""
        return self._digest(len(whose).to_bytes(4, "little") + whose + salt.encode("utf-8", "surrogatepass"))

    def _digest(self, data: bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=DIGEST_BYTES, key=self._key).digest()
