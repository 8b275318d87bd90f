"""What is read from a GGUF's metadata before its weights are loaded."""

from __future__ import annotations

import pytest

from treadle_broker.text.metadata import ModelMetadata

LLAMA = {
    "general.architecture": "llama",
    "general.name": "Small",
    "llama.context_length": "8192",
    "llama.block_count": "30",
    "llama.embedding_length": "576",
    "llama.attention.head_count": "9",
    "llama.attention.head_count_kv": "3",
}


@pytest.mark.parametrize(
    ("kv_type", "expected"),
    [("auto", 23040), ("f16", 23040), ("bf16", 23040), ("f32", 46080), ("q8_0", 12240), ("q4_0", 6480)],
)
def test_kv_bytes_follow_heads_lengths_layers_and_type(kv_type: str, expected: int) -> None:
    assert ModelMetadata(LLAMA).kv_bytes_per_token(kv_type) == expected


def test_heads_may_be_given_for_each_layer() -> None:
    hybrid = LLAMA | {"llama.block_count": "4", "llama.attention.head_count_kv": "[0, 3, 0, 3]"}
    assert ModelMetadata(hybrid).kv_bytes_per_token("f16") == 2 * 3 * (64 + 64) * 2


def test_key_and_value_lengths_may_differ_from_the_embedding_split() -> None:
    own = LLAMA | {"llama.attention.key_length": "192", "llama.attention.value_length": "128"}
    assert ModelMetadata(own).kv_bytes_per_token("f16") == 30 * 3 * (192 + 128) * 2


def test_a_model_without_grouped_heads_uses_its_head_count() -> None:
    plain = {key: value for key, value in LLAMA.items() if not key.endswith("_kv")}
    assert ModelMetadata(plain).kv_bytes_per_token("f16") == 30 * 9 * 128 * 2


@pytest.mark.parametrize("pairs", [{}, {"general.architecture": "llama"}, LLAMA | {"llama.block_count": "many"}])
def test_what_the_file_does_not_say_is_zero(pairs: dict[str, str]) -> None:
    assert ModelMetadata(pairs).kv_bytes_per_token("f16") == 0


def test_an_unknown_kv_type_is_an_error() -> None:
    with pytest.raises(ValueError, match="q3_k"):
        ModelMetadata(LLAMA).kv_bytes_per_token("q3_k")


def test_name_and_context_are_read() -> None:
    assert (ModelMetadata(LLAMA).name, ModelMetadata(LLAMA).context_train) == ("Small", 8192)
    assert (ModelMetadata({}).name, ModelMetadata({}).context_train) == ("", 0)


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ({"tokenizer.ggml.model": "llama"}, True),
        ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.add_space_prefix": "false"}, False),
        ({"tokenizer.ggml.model": "gpt2"}, False),
        ({}, False),
    ],
)
def test_a_space_prefix_is_the_default_of_sentencepiece_alone(pairs: dict[str, str], expected: bool) -> None:
    assert ModelMetadata(pairs).adds_space_prefix is expected
