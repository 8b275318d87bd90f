"""Chooses the next token of one sequence: the chain of SamplingParams, in float64."""

from __future__ import annotations

import hashlib
import struct
from collections import Counter, deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from treadle_shared.bytevocab import EOS
from treadle_shared.engine import TokenLogprobs
from treadle_shared.sampling import SamplingParams
from treadle_worker.reference.arithmetic import Floats

_Scores = npt.NDArray[np.float64]
_Ids = npt.NDArray[np.int64]


class Sampler:
    """The sampling state of one sequence.

    ``emitted`` counts the tokens of the answer that were run, which is the number of the next draw; ``last``
    is the token chosen after the last row, None where none was asked for.
    """

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self.emitted = 0
        self.last: int | None = None
        self._window: deque[int] = deque(maxlen=params.penalty_last_n)

    def feed(self, tokens: Sequence[int], emitted: int) -> None:
        """``tokens`` were run; ``emitted`` tokens of the answer are among all that were run so far."""
        self.emitted = emitted
        self.last = None
        if self.params.penalised:
            self._window.extend(tokens)

    def choose(self, logits: Floats) -> int:
        """The next token for logits (n_vocab,). The same logits, history, seed and draw give the same token."""
        self.last = self._chosen(logits)
        return self.last

    def logprobs(self, logits: Floats, chosen: int) -> TokenLogprobs | None:
        """What the parameters ask to be told of the choice, over the raw logits."""
        if self.params.logprobs is None:
            return None
        scores = logits.astype(np.float64)
        scores -= scores.max()
        scores -= np.log(np.exp(scores).sum())
        likeliest = np.argsort(-scores, kind="stable")[: self.params.logprobs]
        return TokenLogprobs(float(scores[chosen]), [(int(token), float(scores[token])) for token in likeliest])

    def _chosen(self, logits: Floats) -> int:
        if self.params.plain_argmax:
            return int(logits.argmax())
        scores = self._adjusted(logits)
        if self.params.greedy:
            return int(scores.argmax())
        ids, kept = _filtered(scores, self.params)
        return int(ids[_drawn(kept, self.params.temperature, uniform(self.params.seed or 0, self.emitted))])

    def _adjusted(self, logits: Floats) -> _Scores:
        """Logit bias, then penalties, then the mask of end-of-generation."""
        scores = logits.astype(np.float64)
        for token, bias in self.params.logit_bias.items():
            if token < len(scores):
                scores[token] += bias
        if self.params.penalised:
            self._penalise(scores)
        if self.params.ignore_eos:
            scores[EOS] = -np.inf
        return scores

    def _penalise(self, scores: _Scores) -> None:
        """As llama.cpp does: repetition divides or multiplies, frequency and presence subtract."""
        params = self.params
        for token, count in Counter(self._window).items():
            score = scores[token]
            score = score * params.repeat_penalty if score <= 0 else score / params.repeat_penalty
            scores[token] = score - count * params.frequency_penalty - params.presence_penalty


def uniform(seed: int, draw: int) -> float:
    """Draw number ``draw`` of ``seed``, in [0, 1): a hash, so that a session can be taken up at any draw."""
    digest = hashlib.blake2b(struct.pack("<QQ", seed, draw), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _filtered(scores: _Scores, params: SamplingParams) -> tuple[_Ids, _Scores]:
    """Token ids and scores that pass top-k, top-p and min-p, likeliest first, ties by id."""
    ids = np.argsort(-scores, kind="stable")
    if params.top_k:
        ids = ids[: params.top_k]
    kept = scores[ids]
    if params.top_p < 1.0:
        kept = kept[: int(np.searchsorted(np.cumsum(_softmax(kept)), params.top_p)) + 1]
    if params.min_p > 0.0:
        kept = kept[kept >= kept[0] + np.log(params.min_p)]
    return ids[: len(kept)], kept


def _drawn(kept: _Scores, temperature: float, point: float) -> int:
    """The index that ``point`` in [0, 1) falls on, in the distribution at ``temperature``."""
    with np.errstate(over="ignore"):  # a tiny temperature sends every score but the best to -inf, as it should
        cooled = (kept - kept[0]) / temperature
    heights = np.cumsum(_softmax(cooled))
    return min(int(np.searchsorted(heights, point * heights[-1], side="right")), len(kept) - 1)


def _softmax(scores: _Scores) -> _Scores:
    weights: _Scores = np.exp(scores - scores[0])
    weights /= weights.sum()
    return weights
