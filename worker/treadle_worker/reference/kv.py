"""The keys and values of one sequence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from treadle_worker.reference.arithmetic import Floats

_FIRST_CAPACITY = 32  # tokens; small sessions stay small, and growth by doubling copies each row about once


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The shape of one token's KV: float32 keys and values of ``n_layers`` layers."""

    n_layers: int
    n_kv_heads: int
    head_dim: int

    @property
    def bytes_per_token(self) -> int:
        """Bytes of keys and values for one token."""
        return 2 * self.n_layers * self.n_kv_heads * self.head_dim * np.dtype(np.float32).itemsize


class SequenceKv:
    """Keys and values of one sequence, each (n_layers, n_kv_heads, capacity, head_dim), row p for position p."""

    def __init__(self, layout: KvLayout) -> None:
        shape = (layout.n_layers, layout.n_kv_heads, _FIRST_CAPACITY, layout.head_dim)
        self.keys: Floats = np.zeros(shape, dtype=np.float32)
        self.values: Floats = np.zeros(shape, dtype=np.float32)

    @property
    def capacity(self) -> int:
        """Tokens it has room for."""
        return int(self.keys.shape[2])

    def reserve(self, tokens: int) -> None:
        """Make room for ``tokens`` rows in all; what is there stays."""
        if tokens <= self.capacity:
            return
        capacity = max(tokens, 2 * self.capacity)
        self.keys = _grown(self.keys, capacity)
        self.values = _grown(self.values, capacity)

    def take(self, source: SequenceKv, tokens: int) -> None:
        """Begin with the first ``tokens`` rows of another sequence."""
        self.reserve(tokens)
        self.keys[:, :, :tokens] = source.keys[:, :, :tokens]
        self.values[:, :, :tokens] = source.values[:, :, :tokens]


def _grown(rows: Floats, capacity: int) -> Floats:
    n_layers, n_kv_heads, held, head_dim = rows.shape
    grown = np.zeros((n_layers, n_kv_heads, capacity, head_dim), dtype=np.float32)
    grown[:, :, :held] = rows
    return grown
