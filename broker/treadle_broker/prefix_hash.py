"""A prompt's chain of block digests, by which the scheduler knows its beginning without knowing a token."""

from __future__ import annotations

import hashlib
import secrets
from array import array
from typing import Literal

from treadle_broker.session import DIGEST_BYTES
from treadle_shared.budget import PREFIX_BLOCK_TOKENS
from treadle_shared.tokens import pack_tokens

PrefixSharing = Literal["client", "node", "off"]


class PrefixHasher:
    """Digests under a key that lives and dies with this object, so that nobody can guess a prompt from them.

    ``sharing``: ``node`` lets every request start from every other's prompt, ``client`` those of one client alone,
    ``off`` none; a request's own salt parts them further. May be called from any thread.
    """

    def __init__(self, sharing: PrefixSharing, block: int = PREFIX_BLOCK_TOKENS) -> None:
        self._sharing = sharing
        self._block = block
        self._key = secrets.token_bytes(32)

    def chain(self, client: str, salt: str, tokens: array[int]) -> bytes:
        """One digest for each whole block of the prompt, each over everything before it; see ``Job.prefix``."""
        blocks = len(tokens) // self._block
        if self._sharing == "off" or not blocks:
            return b""
        data = memoryview(pack_tokens(tokens))
        step = self._block * tokens.itemsize
        digests = [self._tenant(client, salt)]
        for block in range(blocks):
            digests.append(self._digest(digests[-1] + data[block * step : (block + 1) * step]))
        return b"".join(digests[1:])

    def _tenant(self, client: str, salt: str) -> bytes:
        whose = client.encode("utf-8", "surrogatepass") if self._sharing == "client" else b""
        return self._digest(len(whose).to_bytes(4, "little") + whose + salt.encode("utf-8", "surrogatepass"))

    def _digest(self, data: bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=DIGEST_BYTES, key=self._key).digest()
