"""The byte vocabulary of the reference engine: token ids 0..255 are bytes, then BOS and EOS."""

from __future__ import annotations

BOS = 256
EOS = 257
N_VOCAB = 258
FINGERPRINT = "bytes"  # the ``tokenizer_fingerprint`` of every engine over this vocabulary


def encode_bytes(text: str) -> list[int]:
    """BOS, then the UTF-8 bytes of ``text``."""
    return [BOS, *text.encode()]


def piece(token: int) -> bytes:
    """The bytes a token stands for; BOS and EOS stand for none."""
    return bytes([token]) if 0 <= token < 256 else b""
