"""The worker: the process that owns the model, and the engines that run it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from treadle_worker.reference import KvBatchEngine, KvBoundaryAdapter, ReferenceModel, SessionCache

if TYPE_CHECKING:
    from treadle_worker.llama import LlamaEngine

__all__ = [
    "KvBatchEngine",
    "KvBoundaryAdapter",
    "LlamaEngine",
    "ReferenceModel",
    "SessionCache",
]


def __getattr__(name: str) -> Any:
    """llama.cpp's library is loaded by whoever asks for its engine, not by importing this package."""
    if name == "LlamaEngine":
        from treadle_worker.llama import LlamaEngine

        return LlamaEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
