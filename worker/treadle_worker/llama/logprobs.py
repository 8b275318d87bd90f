"""Log-probabilities over the raw logits."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from treadle_shared.engine import TokenLogprobs

_BLOCK: Final = 256  # values a block: about the square root of a vocabulary, so both steps look at few


def token_logprobs(logits: npt.NDArray[np.float32], chosen: int, n_top: int) -> TokenLogprobs:
    """Natural-log probabilities from one row of shape (n_vocab,): the chosen token's and the ``n_top``
    likeliest, likeliest first, the lower id first where they are equal.

    log softmax(x) = x - max(x) - log(sum(exp(x - max(x)))), in float64.
    """
    row = logits.astype(np.float64)
    row -= row.max()
    row -= np.log(np.exp(row).sum())
    return TokenLogprobs(float(row[chosen]), [(token, float(row[token])) for token in _likeliest(row, n_top)])


def _likeliest(row: npt.NDArray[np.float64], n_top: int) -> list[int]:
    """Ids of the largest values. Only blocks whose maximum reaches the n-th largest block maximum can hold one."""
    n_top = min(n_top, len(row))
    if n_top == 0:
        return []
    contenders = np.arange(len(row))
    peaks = np.maximum.reduceat(row, contenders[::_BLOCK])
    if len(peaks) > n_top:
        bound = np.partition(peaks, len(peaks) - n_top)[len(peaks) - n_top]
        contenders = _members(np.flatnonzero(peaks >= bound), len(row))
        contenders = contenders[row[contenders] >= bound]
    order = np.lexsort((contenders, -row[contenders]))
    return [int(token) for token in contenders[order[:n_top]]]


def _members(blocks: npt.NDArray[np.intp], length: int) -> npt.NDArray[np.intp]:
    ids = (blocks[:, np.newaxis] * _BLOCK + np.arange(_BLOCK)).ravel()
    return ids[ids < length]
