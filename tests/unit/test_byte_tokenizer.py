"""The byte tokenizer of the reference engine."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle_broker.text import ByteTokenizer, Tokenizer
from treadle_shared import bytevocab
from treadle_shared.errors import InvalidRequest


def as_protocol(tokenizer: Tokenizer) -> Tokenizer:
    return tokenizer


@settings(deadline=None)
@given(st.text())
def test_a_text_comes_back_from_its_tokens(text: str) -> None:
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode(text)
    assert isinstance(tokens, array)
    assert tokens.typecode == "i"
    assert tokens[0] == tokenizer.bos
    assert b"".join(map(tokenizer.piece, tokens)).decode() == text


def test_it_agrees_with_the_shared_byte_vocabulary() -> None:
    tokenizer = as_protocol(ByteTokenizer())
    assert list(tokenizer.encode("naïve")) == bytevocab.encode_bytes("naïve")
    assert (tokenizer.n_vocab, tokenizer.bos, tokenizer.eos) == (258, 256, 257)
    assert tokenizer.eog == {bytevocab.EOS}
    assert tokenizer.fingerprint == "bytes"


def test_segments_are_joined_behind_one_bos() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.encode_segments([("a", True), ("b", False)]) == tokenizer.encode("ab")


def test_control_tokens_add_no_text_and_every_other_token_one_byte() -> None:
    tokenizer = ByteTokenizer()
    assert [tokenizer.piece(token) for token in (256, 257)] == [b"", b""]
    assert max(len(tokenizer.piece(token)) for token in range(tokenizer.n_vocab)) == tokenizer.max_piece_bytes


def test_a_lone_surrogate_is_refused_with_the_field_named() -> None:
    with pytest.raises(InvalidRequest, match="character 2") as caught:
        ByteTokenizer().encode("ab\ud800", "messages[0].content")
    assert caught.value.field == "messages[0].content"


def test_what_only_the_engine_knows_is_reported_as_unknown() -> None:
    assert (ByteTokenizer().kv_bytes_per_token("f16"), ByteTokenizer().context_train) == (0, 0)
