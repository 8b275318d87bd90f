"""The fingerprint by which broker and worker know that they speak of the same tokens."""

from __future__ import annotations

import ctypes
import hashlib
import struct
from typing import Any, Final

_DIGEST_BYTES: Final = 16
_MAX_PROBE_TOKENS: Final = 4096  # more than one token a byte cannot come out of the probe
_PROBE: Final = (
    "The 12 quick brown foxes don't jump over 3,456 lazy dogs;  they\tsit\n\n\n"
    "naïve café — “quoted” 北京 歪 ひらがな Привет 👩‍👩‍👧 🇫🇷 x=[1.5e-3]; // ok\r\n    return_value += 1"
)
"""Text whose tokens show merges and pre-tokeniser, which the vocabulary alone does not."""


def tokenizer_fingerprint(lib: Any, vocab: Any) -> str:
    """A digest over what decides how a vocabulary tokenises and detokenises, as 32 hex characters.

    ``lib`` is the ``llama_cpp`` module (handed in, so that this package does not need it) and ``vocab`` the
    ``llama_vocab`` pointer of a model, which may be loaded with ``vocab_only``. Covers the vocabulary's type
    and size, its special tokens, every token's text, attributes and score, and the tokens of a fixed text.
    About 0.1 s for 50,000 tokens.
    """
    size = lib.llama_vocab_n_tokens(vocab)
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    digest.update(_header(lib, vocab, size))
    text, attr, score = lib.llama_vocab_get_text, lib.llama_vocab_get_attr, lib.llama_vocab_get_score
    pack = struct.Struct("<iif").pack
    for token in range(size):
        piece = text(vocab, token) or b""
        digest.update(pack(len(piece), attr(vocab, token), score(vocab, token)) + piece)
    if size:  # a model without a vocabulary has no tokeniser to probe
        digest.update(_probe_tokens(lib, vocab))
    return digest.hexdigest()


def _header(lib: Any, vocab: Any, size: int) -> bytes:
    special = (lib.llama_vocab_bos, lib.llama_vocab_eos, lib.llama_vocab_eot, lib.llama_vocab_nl, lib.llama_vocab_pad)
    adds = (lib.llama_vocab_get_add_bos, lib.llama_vocab_get_add_eos)
    values = [size, lib.llama_vocab_type(vocab), *(int(get(vocab)) for get in (*special, *adds))]
    return struct.pack(f"<{len(values)}i", *values)


def _probe_tokens(lib: Any, vocab: Any) -> bytes:
    text = _PROBE.encode()
    tokens = (ctypes.c_int32 * _MAX_PROBE_TOKENS)()
    count = lib.llama_tokenize(vocab, text, len(text), tokens, _MAX_PROBE_TOKENS, False, False)
    return bytes(tokens)[: 4 * max(count, 0)]
