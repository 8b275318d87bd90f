"""Seeded draws through llama.cpp's sampler chain, one chain a session.

The chain's order is llama.cpp's common one: logit bias, penalties, top-k, top-p, min-p, temperature, draw.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from treadle_shared.sampling import SamplingParams

CHAIN_BYTES: Final = 208 << 10
"""Heap of the largest chain, measured: a full window of 4,096 penalised tokens and 1,024 biases."""

_RANDOM_SEED: Final = 0xFFFFFFFF  # LLAMA_DEFAULT_SEED: llama.cpp would take a random one
_MIN_TEMPERATURE: Final = 1e-5  # below it, logits / temperature leaves float32; the draw is greedy long before
_MIN_KEEP: Final = 1  # candidates that top-p and min-p always leave

_CANDIDATE: Final = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])  # llama_token_data


def mix_seed(seed: int, draw: int) -> int:
    """The uint32 seed of draw number ``draw`` of a session seeded ``seed``.

    SplitMix64's output function (Steele, Lea, Flood 2014) over both numbers: neighbouring seeds and draws
    give unrelated results, and a draw needs none of those before it.
    """
    word = (seed << 32 ^ draw) * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    word = (word ^ word >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    mixed = (word ^ word >> 31) >> 32
    return mixed if mixed != _RANDOM_SEED else mixed - 1


def needs_chain(params: SamplingParams) -> bool:
    """Whether the choice takes more than an arg max over the row without end-of-generation tokens."""
    return not params.greedy or params.penalised or bool(params.logit_bias)


class Candidates:
    """The array a chain works on, filled from a logits row; one for each thread that draws."""

    def __init__(self, api: Any, n_vocab: int) -> None:
        self._ids: npt.NDArray[np.int32] = np.arange(n_vocab, dtype=np.int32)
        self._table: npt.NDArray[np.void] = np.zeros(n_vocab, _CANDIDATE)
        self._pointer = ctypes.cast(self._table.ctypes.data, api.llama_token_data_p)
        self.array = api.llama_token_data_array()
        self.reference = ctypes.byref(self.array)

    def load(self, logits: npt.NDArray[np.float32]) -> None:
        """Every token of the vocabulary with its logit, in order of its id."""
        self._table["id"] = self._ids
        self._table["logit"] = logits
        self.array.data = self._pointer
        self.array.size = len(self._ids)
        self.array.selected = -1
        self.array.sorted = False

    @property
    def chosen(self) -> int:
        """The token that a chain selected."""
        return int(self.array.data[self.array.selected].id)


class SamplerChain:
    """One session's chain; ``free`` gives its memory back."""

    def __init__(self, api: Any, n_vocab: int, params: SamplingParams, eog: Iterable[int]) -> None:
        self._api = api
        self._seed = params.seed or 0
        self._window = params.penalty_last_n if params.penalised else 0
        self._chain = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
        for part in _parts(api, n_vocab, params, eog):
            api.llama_sampler_chain_add(self._chain, part)
        self._draw_at = -1 if params.greedy else api.llama_sampler_chain_n(self._chain)
        if params.greedy:
            api.llama_sampler_chain_add(self._chain, api.llama_sampler_init_greedy())
        else:
            api.llama_sampler_chain_add(self._chain, api.llama_sampler_init_dist(0))

    def free(self) -> None:
        """Free the chain and its parts."""
        if self._chain is not None:
            self._api.llama_sampler_free(self._chain)
            self._chain = None

    def accept(self, tokens: Sequence[int]) -> None:
        """Tell the penalties which tokens were seen, oldest first; only the last ``penalty_last_n`` matter."""
        if self._window:
            for token in tokens[-self._window :]:
                self._api.llama_sampler_accept(self._chain, token)

    def draw(self, logits: npt.NDArray[np.float32], number: int, candidates: Candidates) -> int:
        """Draw number ``number`` of this session from a logits row of shape (n_vocab,)."""
        if self._draw_at >= 0:
            self._reseed(mix_seed(self._seed, number))
        candidates.load(logits)
        self._api.llama_sampler_apply(self._chain, candidates.reference)
        return candidates.chosen

    def _reseed(self, seed: int) -> None:
        """The chain has no way to seed its last part, so the part is replaced."""
        api = self._api
        api.llama_sampler_free(api.llama_sampler_chain_remove(self._chain, self._draw_at))
        api.llama_sampler_chain_add(self._chain, api.llama_sampler_init_dist(seed))


def _parts(api: Any, n_vocab: int, params: SamplingParams, eog: Iterable[int]) -> list[Any]:
    """Everything before the draw; parts that do nothing are left out."""
    parts = []
    biases = _biases(n_vocab, params, eog)
    if biases:
        table = (api.llama_logit_bias * len(biases))(*biases.items())
        parts.append(api.llama_sampler_init_logit_bias(n_vocab, len(biases), table))
    if params.penalised:
        parts.append(_penalties(api, n_vocab, params))
    return parts if params.greedy else parts + _filters(api, params)


def _penalties(api: Any, n_vocab: int, params: SamplingParams) -> Any:
    return api.llama_sampler_init_penalties(
        n_vocab,
        params.penalty_last_n,
        params.repeat_penalty,
        params.frequency_penalty,
        params.presence_penalty,
    )


def _filters(api: Any, params: SamplingParams) -> list[Any]:
    filters = []
    if params.top_k:
        filters.append(api.llama_sampler_init_top_k(params.top_k))
    if params.top_p < 1.0:
        filters.append(api.llama_sampler_init_top_p(params.top_p, _MIN_KEEP))
    if params.min_p > 0.0:
        filters.append(api.llama_sampler_init_min_p(params.min_p, _MIN_KEEP))
    return [*filters, api.llama_sampler_init_temp(max(params.temperature, _MIN_TEMPERATURE))]


def _biases(n_vocab: int, params: SamplingParams, eog: Iterable[int]) -> dict[int, float]:
    """Biases by token; tokens outside the vocabulary are left out, and ``ignore_eos`` masks every end token."""
    biases = {token: bias for token, bias in params.logit_bias.items() if token < n_vocab}
    if params.ignore_eos:
        biases |= dict.fromkeys(eog, -math.inf)
    return biases
