"""Which numbers the KV cache keeps, and what that makes of attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

GGML_TYPES: Final = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8, "bf16": 30}
"""``enum ggml_type``."""

_IN_BLOCKS: Final = frozenset({"f32", "f16"})


@dataclass(frozen=True, slots=True)
class KvTypes:
    """The number types of keys and of values, by the names of ``GGML_TYPES``."""

    key: str
    value: str

    @property
    def row_by_row(self) -> bool:
        """Whether flash attention on a CPU has one kernel for them, which sums each row by itself, cell after cell.

        It has two more, for keys and values of the same float type: one for many rows of a sequence, one for a lone
        row in a long cache. Both sum in blocks of their own. (ggml/src/ggml-cpu/ops.cpp,
        ggml_compute_forward_flash_attn_ext_f16: ``use_split_kv_path`` and ``use_tiled``.)
        """
        return self.key != self.value or self.key not in _IN_BLOCKS


def choose_kv_types(exact: bool, kv_type: str, offloaded: bool) -> KvTypes:
    """The types for a ``kv_type`` of the configuration; ``auto`` is what serves best.

    That is f16, llama.cpp's default, but for exact numerics on a CPU: there keys are bf16, of the same size, so that
    attention runs row by row. What layers on a GPU can mix is another matter.
    """
    if kv_type != "auto":
        return KvTypes(kv_type, kv_type)
    return KvTypes("bf16" if exact and not offloaded else "f16", "f16")
