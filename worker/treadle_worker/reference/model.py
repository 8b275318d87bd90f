"""A dense Llama with random weights: deterministic, small, nothing to download."""

from __future__ import annotations

import hashlib
from dataclasses import astuple, dataclass, fields

import numpy as np
import numpy.typing as npt

from treadle_shared.bytevocab import N_VOCAB
from treadle_shared.errors import ConfigError
from treadle_worker.reference.arithmetic import Floats, blocked, project, rms_norm

NUMERICS_VERSION = 1  # raised with every change that can alter a bit of a logit or the choice of a token

_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceShape:
    """Sizes of a model. The defaults cost 1,536 bytes of KV for each cached token.

    ``n_heads`` query heads share ``n_kv_heads`` key-value heads, each ``head_dim`` wide. ``tied_head`` uses
    the embedding as output head. Raises ConfigError naming the field.
    """

    n_layers: int = 3
    d_model: int = 64
    n_heads: int = 4
    n_kv_heads: int = 2
    head_dim: int = 32
    d_ff: int = 128
    n_vocab: int = N_VOCAB
    tied_head: bool = False
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name != "tied_head" and not getattr(self, field.name) > 0:
                raise ConfigError(field.name, f"must be positive, not {getattr(self, field.name)}")
        if self.n_heads % self.n_kv_heads:
            raise ConfigError("n_heads", f"must be a multiple of n_kv_heads ({self.n_kv_heads}), not {self.n_heads}")
        if self.head_dim % 2:
            raise ConfigError("head_dim", f"must be even to be rotated, not {self.head_dim}")
        if self.n_vocab < N_VOCAB:
            raise ConfigError("n_vocab", f"must hold the byte vocabulary of {N_VOCAB} tokens, not {self.n_vocab}")

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values for one token over all layers."""
        return 2 * self.n_layers * self.n_kv_heads * self.head_dim * _FLOAT_BYTES


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. Norms are (d_model,); projections are blocked (see ``arithmetic.blocked``)."""

    attention_norm: Floats
    query: Floats
    key: Floats
    value: Floats
    output: Floats
    feed_norm: Floats
    gate: Floats
    up: Floats
    down: Floats

    @property
    def nbytes(self) -> int:
        """Bytes of every array."""
        return sum(getattr(self, field.name).nbytes for field in fields(self))


class ReferenceModel:
    """Weights drawn from a Generator seeded with ``seed``; the same shape and seed give the same weights."""

    def __init__(self, shape: ReferenceShape | None = None, seed: int = 0) -> None:
        self.shape = shape or ReferenceShape()
        self.seed = seed
        draw = np.random.default_rng(seed)
        self.embedding: Floats = draw.standard_normal((self.shape.n_vocab, self.shape.d_model), dtype=np.float32)
        self.layers = tuple(_layer(draw, self.shape) for _ in range(self.shape.n_layers))
        self.norm = _gain(draw, self.shape)
        self.head = blocked(self.embedding.T) if self.shape.tied_head else _head(draw, self.shape)

    @property
    def weight_bytes(self) -> int:
        """Bytes of every array that is kept."""
        layers = sum(layer.nbytes for layer in self.layers)
        return self.embedding.nbytes + layers + self.norm.nbytes + self.head.nbytes

    def fingerprint(self, probe: Floats) -> str:
        """A stable name for all that can change a token: a hash of shape, seed, numerics version, and of the
        bits of ``probe``, logits that the instruction set and the BLAS build have a say in.
        """
        recipe = repr((NUMERICS_VERSION, self.seed, astuple(self.shape)))
        return f"reference-{hashlib.sha256(recipe.encode() + probe.tobytes()).hexdigest()[:16]}"

    def embed(self, tokens: npt.NDArray[np.int64]) -> Floats:
        """Token ids (n,) as hidden rows (n, d_model)."""
        return self.embedding[tokens]

    def logits(self, hidden: Floats) -> Floats:
        """The last layer's rows (n, d_model) as logits (n, n_vocab)."""
        return project(rms_norm(hidden, self.norm, self.shape.norm_eps), self.head)


def _layer(draw: np.random.Generator, shape: ReferenceShape) -> LayerWeights:
    heads, kv_heads = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
    return LayerWeights(
        attention_norm=_gain(draw, shape),
        query=_matrix(draw, shape.d_model, heads),
        key=_matrix(draw, shape.d_model, kv_heads),
        value=_matrix(draw, shape.d_model, kv_heads),
        output=_matrix(draw, heads, shape.d_model),
        feed_norm=_gain(draw, shape),
        gate=_matrix(draw, shape.d_model, shape.d_ff),
        up=_matrix(draw, shape.d_model, shape.d_ff),
        down=_matrix(draw, shape.d_ff, shape.d_model),
    )


def _matrix(draw: np.random.Generator, n_in: int, n_out: int) -> Floats:
    """Scaled so that a row of unit variance stays one."""
    weights = draw.standard_normal((n_in, n_out), dtype=np.float32) / np.float32(np.sqrt(n_in))
    return blocked(weights)


def _head(draw: np.random.Generator, shape: ReferenceShape) -> Floats:
    return _matrix(draw, shape.d_model, shape.n_vocab)


def _gain(draw: np.random.Generator, shape: ReferenceShape) -> Floats:
    gain: Floats = 1 + np.float32(0.1) * draw.standard_normal(shape.d_model, dtype=np.float32)
    return gain
