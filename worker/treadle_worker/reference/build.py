"""The reference engine of a node's configuration."""

from __future__ import annotations

from treadle_shared.config import NodeConfig
from treadle_shared.errors import WeightBudgetError
from treadle_worker.reference.adapter import KvBoundaryAdapter
from treadle_worker.reference.cache import SessionCache
from treadle_worker.reference.engine import KvBatchEngine
from treadle_worker.reference.model import ReferenceModel


def build_reference_engine(config: NodeConfig) -> KvBatchEngine:
    """An engine that holds a sequence for each slot and for the cache's, of ``session_tokens`` tokens, within
    ``kv_bytes``, or within what all of them need where that is not set. Raises WeightBudgetError.
    """
    model = ReferenceModel(seed=config.reference_seed)
    if config.weight_bytes is not None and model.weight_bytes > config.weight_bytes:
        raise WeightBudgetError(model.weight_bytes, config.weight_bytes)
    adapter = KvBoundaryAdapter(model)
    sequences = config.effective_slots + config.effective_cache_slots
    whole = sequences * config.session_tokens * adapter.kv_bytes_per_token
    cache = SessionCache(adapter.kv_layout, whole if config.kv_bytes is None else config.kv_bytes)
    return KvBatchEngine(adapter, cache, context_tokens=config.session_tokens, max_sequences=sequences)
