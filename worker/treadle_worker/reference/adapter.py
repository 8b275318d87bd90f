"""Runs a range of a model's layers over the KV of several sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from treadle_shared.errors import ConfigError
from treadle_worker.reference.arithmetic import Floats, attend, project, rms_norm, rotate, rotation, swiglu
from treadle_worker.reference.kv import KvLayout, SequenceKv
from treadle_worker.reference.model import LayerWeights, ReferenceModel


@dataclass(frozen=True, slots=True)
class Span:
    """``count`` rows of one sequence at positions ``start`` onwards; its KV has room for them."""

    kv: SequenceKv
    start: int
    count: int

    @property
    def positions(self) -> range:
        """The positions of its rows."""
        return range(self.start, self.start + self.count)


class KvBoundaryAdapter:
    """Layers ``first`` to ``last - 1`` of a model; the default is every layer.

    One that starts at layer 0 takes token ids, any other the hidden rows its predecessor returned; one that
    ends at the last layer returns logits, any other hidden rows. Raises ConfigError where the range is not
    one of the model's.
    """

    def __init__(self, model: ReferenceModel, first: int = 0, last: int | None = None) -> None:
        last = model.shape.n_layers if last is None else last
        if not 0 <= first < last <= model.shape.n_layers:
            raise ConfigError("layer_range", f"[{first}, {last}) is not within [0, {model.shape.n_layers})")
        self.model = model
        self.layer_range = (first, last)

    @property
    def n_layers(self) -> int:
        """Layers it runs."""
        return self.layer_range[1] - self.layer_range[0]

    @property
    def is_full_shard(self) -> bool:
        """Whether it runs every layer, from token ids to logits."""
        return self.layer_range == (0, self.model.shape.n_layers)

    @property
    def kv_layout(self) -> KvLayout:
        """The shape of one token's KV over its layers."""
        shape = self.model.shape
        return KvLayout(self.n_layers, shape.n_kv_heads, shape.head_dim)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV for one token over its layers."""
        return self.kv_layout.bytes_per_token

    def forward(
        self,
        inputs: npt.NDArray[np.int64] | Floats,
        spans: Sequence[Span],
        outputs: Sequence[int] | None = None,
    ) -> Floats:
        """Run rows, span after span, and write their KV.

        ``inputs``: token ids (n,) or hidden rows (n, d_model), n being the rows of all spans. ``outputs``:
        the rows whose logits are wanted, None for all; without effect where hidden rows are returned.
        Returns logits (len(outputs), n_vocab) or hidden rows (n, d_model).
        """
        first, last = self.layer_range
        hidden: Floats = self.model.embed(inputs.astype(np.int64)) if first == 0 else inputs.astype(np.float32)
        turn = self._rotation(spans)
        for index, layer in enumerate(self.model.layers[first:last]):
            hidden = self._layer(layer, index, hidden, spans, turn)
        if last < self.model.shape.n_layers:
            return hidden
        return self.model.logits(hidden if outputs is None else hidden[list(outputs)])

    def _rotation(self, spans: Sequence[Span]) -> tuple[Floats, Floats]:
        positions = np.concatenate([np.asarray(span.positions, dtype=np.int64) for span in spans])
        return rotation(positions, self.model.shape.head_dim, self.model.shape.rope_theta)

    def _layer(
        self, layer: LayerWeights, index: int, hidden: Floats, spans: Sequence[Span], turn: tuple[Floats, Floats]
    ) -> Floats:
        eps = self.model.shape.norm_eps
        hidden = hidden + self._attention(layer, index, rms_norm(hidden, layer.attention_norm, eps), spans, turn)
        normed = rms_norm(hidden, layer.feed_norm, eps)
        fed = project(swiglu(project(normed, layer.gate), project(normed, layer.up)), layer.down)
        return hidden + fed

    def _attention(
        self, layer: LayerWeights, index: int, normed: Floats, spans: Sequence[Span], turn: tuple[Floats, Floats]
    ) -> Floats:
        shape = self.model.shape
        n, kv_heads, dim = len(normed), shape.n_kv_heads, shape.head_dim
        queries = rotate(project(normed, layer.query).reshape(n, shape.n_heads, dim), *turn) / np.float32(np.sqrt(dim))
        keys = rotate(project(normed, layer.key).reshape(n, kv_heads, dim), *turn)
        values = project(normed, layer.value).reshape(n, kv_heads, dim)
        mixed = np.empty((n, kv_heads, shape.n_heads // kv_heads, dim), dtype=np.float32)
        _mix(queries.reshape(mixed.shape), keys, values, spans, index, mixed)
        return project(mixed.reshape(n, -1), layer.output)


def _mix(queries: Floats, keys: Floats, values: Floats, spans: Sequence[Span], index: int, mixed: Floats) -> None:
    """Store each span's new keys and values, then attend row by row over all that precede it."""
    row = 0
    for span in spans:
        held_keys, held_values = span.kv.keys[index], span.kv.values[index]
        end = span.start + span.count
        held_keys[:, span.start : end] = keys[row : row + span.count].swapaxes(0, 1)
        held_values[:, span.start : end] = values[row : row + span.count].swapaxes(0, 1)
        for position in span.positions:
            seen = position + 1
            mixed[row] = attend(queries[row], held_keys[:, :seen], held_values[:, :seen])
            row += 1
