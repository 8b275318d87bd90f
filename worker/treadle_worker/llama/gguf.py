"""A look into a model's files before anything is loaded: is it a whole GGUF, and what is in it."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treadle_shared.errors import ModelError
from treadle_shared.modelfile import check_model, model_files
from treadle_worker.llama.library import Library


class _InitParams(ctypes.Structure):
    """``struct gguf_init_params``."""

    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.POINTER(ctypes.c_void_p)))


@dataclass(frozen=True, slots=True)
class GgufSummary:
    """``files`` in order (one, or all parts of a split model), the ggml types of their weight matrices (vectors,
    such as those of norms, are never multiplied as matrices and do not count), and their weights' size in bytes.
    """

    files: tuple[Path, ...]
    weight_types: frozenset[int]
    weight_bytes: int


def inspect_model(library: Library, path: Path) -> GgufSummary:
    """Look at a model's header and size. Raises ModelError with one sentence that says what is wrong."""
    check_model(path)
    files = model_files(path)
    types: set[int] = set()
    total = 0
    for file in files:
        file_types, file_bytes = _read_tensors(library, file)
        types |= file_types
        total += file_bytes
    return GgufSummary(files, frozenset(types), total)


def _read_tensors(library: Library, path: Path) -> tuple[set[int], int]:
    """Types of the matrices and bytes of all tensors in one file. Raises ModelError where it is cut short."""
    ggml = library.ggml
    _declare(ggml)
    library.log.forget_errors()
    table = ctypes.c_void_p()
    header = ggml.gguf_init_from_file(os.fsencode(path), _InitParams(True, ctypes.pointer(table)))
    if not header:
        raise ModelError(f"{path}: the header is damaged or cut short: {library.log.last_error or 'unreadable'}")
    try:
        tensors = range(ggml.gguf_get_n_tensors(header))
        sizes = [ggml.gguf_get_tensor_size(header, tensor) for tensor in tensors]
        ends = [ggml.gguf_get_tensor_offset(header, tensor) + sizes[tensor] for tensor in tensors]
        types = {
            ggml.gguf_get_tensor_type(header, number) for number in tensors if _is_matrix(ggml, header, table, number)
        }
        needed = ggml.gguf_get_data_offset(header) + max(ends, default=0)
    finally:
        ggml.gguf_free(header)
        ggml.ggml_free(table)
    actual = path.stat().st_size
    if actual < needed:
        raise ModelError(f"{path}: is cut short: {actual} of {needed} bytes are there")
    return types, sum(sizes)


def _is_matrix(ggml: Any, header: Any, table: Any, number: int) -> bool:
    tensor = ggml.ggml_get_tensor(table, ggml.gguf_get_tensor_name(header, number))
    return bool(ggml.ggml_n_dims(tensor) > 1)


def _declare(ggml: Any) -> None:
    """Signatures of the functions used here, from ``gguf.h`` and ``ggml.h``."""
    ggml.gguf_init_from_file.argtypes = [ctypes.c_char_p, _InitParams]
    ggml.gguf_init_from_file.restype = ctypes.c_void_p
    ggml.gguf_free.argtypes = [ctypes.c_void_p]
    ggml.gguf_free.restype = None
    ggml.ggml_free.argtypes = [ctypes.c_void_p]
    ggml.ggml_free.restype = None
    ggml.ggml_get_tensor.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    ggml.ggml_get_tensor.restype = ctypes.c_void_p
    ggml.ggml_n_dims.argtypes = [ctypes.c_void_p]
    ggml.ggml_n_dims.restype = ctypes.c_int
    ggml.gguf_get_tensor_name.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    ggml.gguf_get_tensor_name.restype = ctypes.c_char_p
    for name in ("gguf_get_data_offset", "gguf_get_n_tensors"):
        getattr(ggml, name).argtypes = [ctypes.c_void_p]
        getattr(ggml, name).restype = ctypes.c_int64
    for name in ("gguf_get_tensor_size", "gguf_get_tensor_offset"):
        getattr(ggml, name).argtypes = [ctypes.c_void_p, ctypes.c_int64]
        getattr(ggml, name).restype = ctypes.c_size_t
    ggml.gguf_get_tensor_type.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    ggml.gguf_get_tensor_type.restype = ctypes.c_int
