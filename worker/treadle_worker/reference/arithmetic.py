"""Row-wise arithmetic of a Llama: every function gives a row the bits it would get alone.

A matrix product over all rows at once (GEMM) picks kernels by the number of rows, so a row's last bits would
depend on its neighbours. Here numpy runs one matrix-vector product a row (a stacked ``matmul`` of one-row
matrices), and everything else works element by element or along one row.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float32]

_MAX_PRODUCT = 9215
"""Elements of one matrix-vector product; OpenBLAS hands larger ones to threads, whose number would then
decide where a sum is split."""


def blocked(weights: Floats) -> Floats:
    """Weights of shape (n_in, n_out) as (n_blocks, n_in, n_out / n_blocks), contiguous, no block too large."""
    n_in, n_out = weights.shape
    widths = [width for width in range(1, n_out + 1) if n_out % width == 0 and width * n_in <= _MAX_PRODUCT]
    width = max(widths, default=1)
    return np.ascontiguousarray(weights.reshape(n_in, n_out // width, width).swapaxes(0, 1))


def project(rows: Floats, blocks: Floats) -> Floats:
    """Rows (n, n_in) times blocked weights: (n, n_out)."""
    n_blocks, _, width = blocks.shape
    product: Floats = np.matmul(rows[:, None, None, :], blocks)
    return product.reshape(len(rows), n_blocks * width)


def rms_norm(rows: Floats, gain: Floats, eps: float) -> Floats:
    """Root-mean-square normalisation (Zhang and Sennrich 2019) of rows (n, d)."""
    mean_square = np.add.reduce(rows * rows, axis=-1, keepdims=True) / np.float32(rows.shape[-1])
    scale: Floats = np.sqrt(mean_square + np.float32(eps))
    return rows / scale * gain


def rotation(positions: npt.NDArray[np.int64], head_dim: int, theta: float) -> tuple[Floats, Floats]:
    """Cosines and sines of rotary embedding (Su et al. 2021), each (n, 1, head_dim / 2)."""
    frequencies = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    angles = positions[:, None, None] * frequencies
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rotate(heads: Floats, cosines: Floats, sines: Floats) -> Floats:
    """Rotate heads (n, n_heads, head_dim); a pair is an element of the first half and its twin in the second."""
    half = heads.shape[-1] // 2
    low, high = heads[..., :half], heads[..., half:]
    rotated = np.empty_like(heads)
    rotated[..., :half] = low * cosines - high * sines
    rotated[..., half:] = high * cosines + low * sines
    return rotated


def attend(queries: Floats, keys: Floats, values: Floats) -> Floats:
    """Grouped-query attention of one row: queries (n_kv_heads, group, head_dim), already scaled, over keys and
    values (n_kv_heads, n, head_dim). Its shapes depend on the row's position alone.
    """
    weights: Floats = np.matmul(queries, keys.swapaxes(1, 2))
    weights -= np.maximum.reduce(weights, axis=-1, keepdims=True)
    np.exp(weights, out=weights)
    mixed: Floats = np.matmul(weights, values)
    mixed /= np.add.reduce(weights, axis=-1, keepdims=True)
    return mixed


def swiglu(gate: Floats, up: Floats) -> Floats:
    """The gated activation of Llama's feed-forward layer (Shazeer 2020), rows (n, d_ff)."""
    exponential: Floats = np.exp(-gate)
    return gate / (exponential + np.float32(1.0)) * up
