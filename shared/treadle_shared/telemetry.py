"""The scheduler's state in numbers."""

from __future__ import annotations

from typing import Any

import msgspec


class SchedulerTelemetry(msgspec.Struct, frozen=True, kw_only=True):
    """One consistent snapshot. Bytes and tokens; ``*_pressure`` is used / budget; rates are per second over
    the last ten seconds of the scheduler's clock.

    ``submitted_total == queue_depth + active_sessions + done_total + failed_total + cancelled_total +
    rejected_total`` holds in every snapshot. ``active_sessions`` counts every session that was promoted and
    has no final result yet; with ticks in flight one that waits for its last token may already have left
    its slot to the next. ``kv_bytes`` is what live sessions hold, ``kv_cached_bytes`` what finished ones left
    for reuse. ``batch_occupancy_avg`` averages over ticks that decoded.

    ``parked_sessions`` are active ones that gave up their slot and wait for the next; ``parked_bytes`` is the host
    memory in which their KV waits, by the engine's own count. Of ``parks_total``, ``park_drops_total`` did not keep
    their KV and computed it anew.

    Of ``prefix_lookups_total`` sequences that were begun, with ``prefix_prompt_tokens_total`` tokens to be prefilled,
    ``prefix_hits_total`` took their first ``prefix_hit_tokens_total`` tokens together from another sequence;
    ``prefix_hit_rate`` is hit / prompt tokens.
    """

    active_sessions: int
    queue_depth: int
    batch_occupancy_last: int
    batch_occupancy_avg: float
    batch_occupancy_max: int
    kv_bytes: int
    kv_cached_bytes: int
    kv_budget_bytes: int
    kv_pressure: float
    scratch_bytes: int
    scratch_budget_bytes: int
    scratch_pressure: float
    weight_bytes: int
    weight_budget_bytes: int
    ticks_total: int
    prefill_tokens_total: int
    decode_tokens_total: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    submitted_total: int
    done_total: int
    failed_total: int
    cancelled_total: int
    rejected_total: int
    rejected_by_reason: dict[str, int]
    parked_sessions: int = 0
    parked_bytes: int = 0
    park_budget_bytes: int = 0
    parks_total: int = 0
    park_drops_total: int = 0
    prefix_lookups_total: int = 0
    prefix_hits_total: int = 0
    prefix_prompt_tokens_total: int = 0
    prefix_hit_tokens_total: int = 0
    prefix_hit_rate: float = 0.0

    @property
    def balanced(self) -> bool:
        """Whether every submission is accounted for."""
        settled = self.done_total + self.failed_total + self.cancelled_total + self.rejected_total
        return self.submitted_total == self.queue_depth + self.active_sessions + settled

    def to_dict(self) -> dict[str, Any]:
        """The snapshot as JSON-safe built-ins."""
        return dict(msgspec.to_builtins(self))
