"""What a GGUF file says of its model, before any weight is loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from fractions import Fraction
from math import ceil

_BYTES_PER_VALUE = {
    "auto": Fraction(2),  # f16, or bf16 beside it
    "f32": Fraction(4),
    "f16": Fraction(2),
    "bf16": Fraction(2),
    "q8_0": Fraction(34, 32),  # blocks of 32 values: a float16 scale and 32 bytes
    "q4_0": Fraction(18, 32),  # a float16 scale and 16 bytes
}
"""Bytes of one KV value, by ``kv_type``; block layouts as in ggml."""


class ModelMetadata:
    """A GGUF's key-value pairs, as text. Keys and defaults are those of the GGUF specification."""

    def __init__(self, pairs: Mapping[str, str]) -> None:
        self._pairs = pairs
        self._arch = pairs.get("general.architecture", "")

    @property
    def name(self) -> str:
        """``general.name``, or empty."""
        return self._pairs.get("general.name", "")

    @property
    def context_train(self) -> int:
        """The context the model was trained for, in tokens; 0 where it does not say."""
        return max(self._per_layer("context_length"), default=0)

    @property
    def adds_space_prefix(self) -> bool:
        """Whether the tokenizer puts a space before text that follows a special token."""
        default = "true" if self._pairs.get("tokenizer.ggml.model") == "llama" else "false"
        return self._pairs.get("tokenizer.ggml.add_space_prefix", default) == "true"

    def kv_bytes_per_token(self, kv_type: str) -> int:
        """Bytes of KV cache a token takes over all layers: heads times key and value lengths.

        An estimate from above for models whose layers keep less (sliding windows, compressed attention).
        0 where the file does not say. Raises ValueError for an unknown ``kv_type``.
        """
        if kv_type not in _BYTES_PER_VALUE:
            raise ValueError(f"unknown KV type {kv_type!r}")
        heads = self._heads_over_all_layers()
        values = heads * (self._head_length("key_length") + self._head_length("value_length"))
        return ceil(values * _BYTES_PER_VALUE[kv_type])

    def _heads_over_all_layers(self) -> int:
        """KV heads summed over the layers; a single number in the file stands for every layer."""
        layers = max(self._per_layer("block_count"), default=0)
        heads = self._per_layer("attention.head_count_kv") or self._per_layer("attention.head_count")
        return heads[0] * layers if len(heads) == 1 else sum(heads[:layers])

    def _head_length(self, key: str) -> int:
        if own := self._per_layer(f"attention.{key}"):
            return max(own)
        heads = max(self._per_layer("attention.head_count"), default=0)
        embedding = max(self._per_layer("embedding_length"), default=0)
        return embedding // heads if heads else 0

    def _per_layer(self, key: str) -> list[int]:
        """The numbers under an architecture's key: one, one a layer, or none."""
        try:
            value = json.loads(self._pairs[f"{self._arch}.{key}"])
        except (KeyError, ValueError):
            return []
        numbers = value if isinstance(value, list) else [value]
        return numbers if all(type(number) is int and number >= 0 for number in numbers) else []
