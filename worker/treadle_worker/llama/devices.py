"""The devices that ggml found, and which of them a configuration means."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from treadle_shared.config import NodeConfig
from treadle_shared.errors import ConfigError
from treadle_worker.llama.library import Library

_GPU_TYPES = frozenset({1, 2})  # GGML_BACKEND_DEVICE_TYPE_GPU, _IGPU


@dataclass(frozen=True, slots=True)
class Device:
    """One ggml backend device: its name (``CPU``, ``CUDA0``, …), handle, and whether it is a GPU."""

    name: str
    handle: int
    gpu: bool


def list_devices(library: Library) -> list[Device]:
    """Every device of this build, in ggml's order."""
    ggml = library.ggml
    _declare(ggml)
    handles = [ggml.ggml_backend_dev_get(index) for index in range(ggml.ggml_backend_dev_count())]
    return [
        Device(
            ggml.ggml_backend_dev_name(handle).decode("utf-8", "replace"),
            handle,
            ggml.ggml_backend_dev_type(handle) in _GPU_TYPES,
        )
        for handle in handles
    ]


def choose_devices(library: Library, config: NodeConfig) -> list[Device]:
    """The GPUs that hold layers; none for a model that stays on the CPU.

    Raises ConfigError for ``n_gpu_layers`` in a build without a GPU, and for a ``device`` that is not there.
    """
    devices = list_devices(library)
    wanted = _named(devices, config.device) if config.device else None
    if config.n_gpu_layers == 0:
        return []
    if not library.offloads or not any(device.gpu for device in devices):
        raise ConfigError("n_gpu_layers", "must be 0: this build of llama.cpp has no usable GPU")
    if wanted is None:
        return [device for device in devices if device.gpu]
    if not wanted.gpu:
        raise ConfigError("device", f"{wanted.name} is not a GPU; n_gpu_layers must then be 0")
    return [wanted]


def _named(devices: list[Device], name: str) -> Device:
    for device in devices:
        if device.name.lower() == name.lower():
            return device
    known = ", ".join(device.name for device in devices) or "none"
    raise ConfigError("device", f"{name!r} is not there; this build has: {known}")


def _declare(ggml: Any) -> None:
    """Signatures of the functions used here, from ``ggml-backend.h``."""
    ggml.ggml_backend_dev_count.argtypes = []
    ggml.ggml_backend_dev_count.restype = ctypes.c_size_t
    ggml.ggml_backend_dev_get.argtypes = [ctypes.c_size_t]
    ggml.ggml_backend_dev_get.restype = ctypes.c_void_p
    ggml.ggml_backend_dev_name.argtypes = [ctypes.c_void_p]
    ggml.ggml_backend_dev_name.restype = ctypes.c_char_p
    ggml.ggml_backend_dev_type.argtypes = [ctypes.c_void_p]
    ggml.ggml_backend_dev_type.restype = ctypes.c_int
