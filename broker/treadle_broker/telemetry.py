"""The scheduler's snapshot in numbers."""

from __future__ import annotations

from treadle_broker.counters import Counters
from treadle_broker.roster import Roster
from treadle_shared.telemetry import SchedulerTelemetry


def snapshot(roster: Roster, counters: Counters, now: float) -> SchedulerTelemetry:
    """Everything at one instant of the scheduler's clock."""
    budget, facts = roster.budget, roster.facts
    kv_bytes = roster.ledger.live_rows * facts.kv_bytes_per_token
    scratch_bytes = roster.slots.used * budget.scratch_bytes_per_session
    prefill_rate, decode_rate = counters.rates(now)
    return SchedulerTelemetry(
        active_sessions=roster.active,
        queue_depth=len(roster.queue),
        batch_occupancy_last=counters.occupancy_last,
        batch_occupancy_avg=counters.occupancy_avg,
        batch_occupancy_max=counters.occupancy_max,
        kv_bytes=kv_bytes,
        kv_cached_bytes=roster.prefixes.rows * facts.kv_bytes_per_token,
        kv_budget_bytes=budget.kv_bytes,
        kv_pressure=kv_bytes / budget.kv_bytes,
        scratch_bytes=scratch_bytes,
        scratch_budget_bytes=budget.scratch_bytes,
        scratch_pressure=scratch_bytes / budget.scratch_bytes,
        weight_bytes=facts.weight_bytes,
        weight_budget_bytes=budget.weight_bytes,
        ticks_total=counters.ticks,
        prefill_tokens_total=counters.prefill_tokens,
        decode_tokens_total=counters.decode_tokens,
        prefill_tokens_per_s=prefill_rate,
        decode_tokens_per_s=decode_rate,
        submitted_total=counters.submitted,
        done_total=counters.ended["done"],
        failed_total=counters.ended["failed"],
        cancelled_total=counters.ended["cancelled"],
        rejected_total=counters.rejected_total,
        rejected_by_reason=dict(counters.rejected),
        parked_sessions=len(roster.parking),
        parked_bytes=roster.parking.engine_bytes,
        park_budget_bytes=budget.park_bytes,
        parks_total=roster.parking.parks,
        park_drops_total=roster.parking.drops,
        prefix_lookups_total=counters.prefix_lookups,
        prefix_hits_total=counters.prefix_hits,
        prefix_prompt_tokens_total=counters.prefix_prompt_tokens,
        prefix_hit_tokens_total=counters.prefix_hit_tokens,
        prefix_hit_rate=counters.prefix_hit_tokens / max(counters.prefix_prompt_tokens, 1),
    )
