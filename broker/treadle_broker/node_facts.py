"""What the node knows of its model before and after the worker says it, and the budget that follows."""

from __future__ import annotations

from treadle_broker.text import Tokenizer
from treadle_shared.budget import NodeBudget
from treadle_shared.config import NodeConfig
from treadle_shared.engine import EngineFacts

_LONGEST_PREFILL_MS = 5000  # whoever comes meanwhile waits for it
_OF_TIMEOUT = 6  # a tick prefills for this part of ``tick_timeout_s`` at most: what it takes is an estimate
_UNBOUNDED = 1 << 52  # stands for "no budget was set" where a real figure is not known yet


def expected_facts(config: NodeConfig, tokenizer: Tokenizer) -> EngineFacts:
    """What the worker will probably say, so that sessions can be admitted while its model loads.

    The recipe is empty: nothing has been computed with one yet.
    """
    return EngineFacts(
        recipe_fingerprint="",
        n_vocab=tokenizer.n_vocab,
        context_tokens=config.session_tokens,
        max_sequences=config.effective_slots,
        kv_bytes_per_token=max(1, tokenizer.kv_bytes_per_token(config.kv_type)),
        weight_bytes=0,
        tokenizer_fingerprint=tokenizer.fingerprint,
    )


def derive_budget(config: NodeConfig, facts: EngineFacts) -> NodeBudget:
    """The budget that the configuration and the engine's facts come to.

    Where no figure was set, KV is as many whole contexts as there are slots for sessions and for what is kept of ended
    ones, scratch for each slot of a session what one was measured to cost, parked KV a whole context for each session,
    and weights what is loaded.
    """
    cache_slots = config.effective_cache_slots if facts.can_copy else 0
    contexts = config.effective_slots + cache_slots
    scratch_each = facts.scratch_bytes_per_session
    parked_each = facts.parked_bytes_each + facts.context_tokens * facts.parked_bytes_per_token
    park_bytes = config.max_sessions * parked_each if config.park_bytes is None else config.park_bytes
    return NodeBudget(
        weight_bytes=config.weight_bytes or max(1, facts.weight_bytes),
        kv_bytes=config.kv_bytes or contexts * facts.context_tokens * facts.kv_bytes_per_token,
        scratch_bytes=config.scratch_bytes or config.effective_slots * scratch_each or _UNBOUNDED,
        scratch_bytes_per_session=scratch_each,
        queue_depth=config.queue_depth,
        queue_tokens=config.queue_tokens,
        max_active=config.max_sessions,
        max_batch_size=config.max_batch_size,
        max_prefill_tokens_per_tick=config.max_prefill_tokens_per_tick,
        burst_prefill_tokens_per_tick=config.burst_prefill_tokens_per_tick,
        target_itl_ms=config.target_itl_ms,
        target_ttft_ms=config.target_ttft_ms,
        coalesce_ms=config.coalesce_ms,
        longest_prefill_ms=_longest_prefill_ms(config),
        kv_policy=config.kv_policy,
        slots=config.effective_slots,
        slice_tokens=config.slice_tokens,
        park_bytes=park_bytes if config.kv_policy == "optimistic" else 0,
        cache_slots=cache_slots,
    )


def _longest_prefill_ms(config: NodeConfig) -> int:
    return max(1, min(_LONGEST_PREFILL_MS, int(1000 * config.tick_timeout_s / _OF_TIMEOUT)))
