"""Log-probabilities over the raw logits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from treadle_shared.engine import TokenLogprobs


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
    n_top = min(n_top, len(row))
    if n_top == 0:
        return []
    bound = np.partition(row, len(row) - n_top)[len(row) - n_top]
    contenders = np.flatnonzero(row >= bound)  # more than n_top only where some are equal
    order = np.lexsort((contenders, -row[contenders]))
    return [int(token) for token in contenders[order[:n_top]]]
