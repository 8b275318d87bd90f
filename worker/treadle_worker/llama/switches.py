"""Which of llama.cpp's kernels and layouts a model runs with, and what keeps a choice from being exact."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from treadle_worker.llama.kv_types import KvTypes

WeightTypes = frozenset[int]
"""The ggml types (``enum ggml_type``) of a model's weight matrices."""

_IQ4_NL: Final = 20
_FLOATS: Final = {0: "F32", 1: "F16", 30: "BF16"}
_ROW_BY_ROW: Final = frozenset({2, 3, 6, 7, 8, _IQ4_NL, *_FLOATS})
"""Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL and floats: no tiled kernel serves them, and their repacked kernels, where
there are any, give the same bits for every number of rows. Those of K-quants and the others do not."""


@dataclass(frozen=True, slots=True)
class KernelSwitches:
    """What llama.cpp may use, each on where True.

    ``flash_attention``: attention without a matrix of scores. Where it does not go row by row (``KvTypes``), it sums in
    blocks whose bounds depend on the length of the KV cache. Without it, a lone row takes other kernels than several.
    ``unified_kv``: all sequences share one pool of cells, so that a sum runs over everybody's.
    ``tiled_kernels``: from 8 rows on, matrices in K- and I-quants go through a kernel that rounds differently.
    ``repacked_weights``: weights may be stored in another order, with kernels of their own for 1 and for 4 rows.
    """

    flash_attention: bool
    unified_kv: bool
    tiled_kernels: bool
    repacked_weights: bool


SwitchChoice = Callable[[bool, WeightTypes, KvTypes], KernelSwitches]
"""Chooses from: whether numerics are exact, the model's weight types, and those of its KV cache."""

_FAST: Final = KernelSwitches(
    flash_attention=True,
    unified_kv=False,  # a shared pool costs decode speed from a few sessions on
    tiled_kernels=True,
    repacked_weights=True,
)


def choose_switches(exact: bool, weight_types: WeightTypes, kv_types: KvTypes) -> KernelSwitches:
    """The switches a model runs with: all of them on in fast numerics, the fewest off that exact ones need.

    The tiled kernels are off in every exact run: a model that has no such weights never uses them, so that
    costs it nothing, and the switch is the whole process's, which may load such a model next. (Forced for every
    number of rows, GGML_CPU_TILED_MM_FORCE=1, they are exact too; a single session then decodes at half the speed.)
    """
    if not exact:
        return _FAST
    return KernelSwitches(
        flash_attention=kv_types.row_by_row,
        unified_kv=False,
        tiled_kernels=False,
        repacked_weights=weight_types <= _ROW_BY_ROW,
    )


def obstacles(switches: KernelSwitches, weight_types: WeightTypes, kv_types: KvTypes, tiny_blas: bool) -> list[str]:
    """What is known to make a sequence's outputs depend on what runs beside it; each is a sentence for people."""
    found = []
    if switches.flash_attention and not kv_types.row_by_row:
        found.append(f"flash attention sums a KV cache of {kv_types.key} in blocks")
    if switches.unified_kv:
        found.append("the KV cache is unified")
    if switches.tiled_kernels and not weight_types <= _ROW_BY_ROW:
        found.append("the tiled kernel for K- and I-quants is on")
    if switches.repacked_weights and not weight_types <= _ROW_BY_ROW:
        found.append("weights are repacked")
    summed = [name for number, name in _FLOATS.items() if number in weight_types]
    if _IQ4_NL in weight_types and not switches.repacked_weights:
        summed.append("IQ4_NL")
    if summed and tiny_blas:
        found.append(f"{' and '.join(summed)} weights need a llama.cpp built with -DGGML_LLAMAFILE=OFF")
    return found
