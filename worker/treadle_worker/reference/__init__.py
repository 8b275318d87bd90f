"""The reference engine: a KV-cached dense Llama in numpy with a byte vocabulary."""

from treadle_worker.reference.adapter import KvBoundaryAdapter
from treadle_worker.reference.build import build_reference_engine
from treadle_worker.reference.cache import SessionCache
from treadle_worker.reference.engine import KvBatchEngine
from treadle_worker.reference.model import ReferenceModel, ReferenceShape

__all__ = [
    "KvBatchEngine",
    "KvBoundaryAdapter",
    "ReferenceModel",
    "ReferenceShape",
    "SessionCache",
    "build_reference_engine",
]
