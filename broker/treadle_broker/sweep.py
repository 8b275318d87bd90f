"""The concurrency sweep in one process: the same jobs at several levels, over any engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

from treadle_broker.embedded import ContinuousBatchScheduler, SessionOutput
from treadle_shared.budget import NodeBudget
from treadle_shared.concurrency import ConcurrencyResult, ConcurrencySweep, Percentiles, SweepPlan
from treadle_shared.engine import BatchEngine, EngineFacts
from treadle_shared.request import GenerationRequest
from treadle_shared.sampling import SamplingParams


def run_concurrency_sweep(
    make_engine: Callable[[int], BatchEngine],
    *,
    levels: Sequence[int] = (1, 2, 4, 8),
    jobs: int = 8,
    prompt_tokens: int = 4,
    new_tokens: int = 8,
    depth: int = 1,
    clock: Callable[[], float] = time.monotonic,
) -> ConcurrencySweep:
    """Run the jobs at each level, submitted together before the first tick.

    ``make_engine`` gets the level and returns a fresh engine of at least as many sequences; one with a ``close``
    method is closed after its level. One prompt is prefilled a tick; answers ignore end-of-generation tokens, so
    each has ``new_tokens`` tokens. Raises ConfigError naming an argument that is not positive.
    """
    plan = SweepPlan(levels=tuple(levels), jobs=jobs, prompt_tokens=prompt_tokens, new_tokens=new_tokens)
    results = [_run_level(make_engine, level, plan, depth, clock) for level in plan.levels]
    alone = results[0] if plan.levels[0] == 1 else _run_level(make_engine, 1, plan, depth, clock)
    return ConcurrencySweep(levels=results, baseline=alone.outputs)


def _run_level(
    make_engine: Callable[[int], BatchEngine], level: int, plan: SweepPlan, depth: int, clock: Callable[[], float]
) -> ConcurrencyResult:
    engine = make_engine(level)
    try:
        return _measure(engine, level, plan, depth, clock)
    finally:
        close = getattr(engine, "close", None)
        if close is not None:
            close()


def _measure(
    engine: BatchEngine, level: int, plan: SweepPlan, depth: int, clock: Callable[[], float]
) -> ConcurrencyResult:
    scheduler = ContinuousBatchScheduler(engine, _budget(engine.facts, level, plan), depth=depth, clock=clock)
    started = clock()
    scheduler.submit_many([_request(job, plan, engine.facts.n_vocab) for job in range(plan.jobs)])
    outputs = scheduler.run_to_completion()
    elapsed = max(clock() - started, 1e-9)
    scheduler.check()
    seen = scheduler.telemetry()
    return ConcurrencyResult(
        concurrency=level,
        ticks=seen.ticks_total,
        avg_occupancy=seen.batch_occupancy_avg,
        max_occupancy=seen.batch_occupancy_max,
        tokens_per_tick=(seen.prefill_tokens_total + seen.decode_tokens_total) / max(seen.ticks_total, 1),
        peak_kv_bytes=scheduler.kv_peak_bytes,
        kv_pressure=scheduler.kv_peak_bytes / seen.kv_budget_bytes,
        tokens_per_s=sum(len(output.tokens) for output in outputs.values()) / elapsed,
        ttft_ms=Percentiles.of([output.token_times[0] - started for output in outputs.values() if output.token_times]),
        itl_ms=Percentiles.of(_gaps(outputs.values())),
        cache_misses=scheduler.cache_misses,
        rejected_admissions=seen.rejected_total,
        outputs={session_id: output.tokens for session_id, output in outputs.items()},
    )


def _gaps(outputs: Iterable[SessionOutput]) -> list[float]:
    return [later - earlier for output in outputs for earlier, later in pairwise(output.token_times)]


def _budget(facts: EngineFacts, level: int, plan: SweepPlan) -> NodeBudget:
    return NodeBudget(
        weight_bytes=max(facts.weight_bytes, 1),
        kv_bytes=level * (plan.prompt_tokens + plan.new_tokens) * facts.kv_bytes_per_token,
        scratch_bytes=max(level * facts.scratch_bytes_per_session, 1),
        scratch_bytes_per_session=facts.scratch_bytes_per_session,
        queue_depth=plan.jobs,
        queue_tokens=plan.jobs * plan.prompt_tokens,
        max_active=level,
        max_prefill_tokens_per_tick=plan.prompt_tokens,
    )


def _request(job: int, plan: SweepPlan, n_vocab: int) -> GenerationRequest:
    return GenerationRequest(
        session_id=f"job-{job}",
        prompt_tokens=plan.prompt(job, n_vocab),
        max_new_tokens=plan.new_tokens,
        params=SamplingParams(ignore_eos=True, seed=job),
    )
