"""The concurrency sweep: the same jobs at several levels of concurrency, and what that does to the figures."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from treadle_broker.embedded import ContinuousBatchScheduler
from treadle_shared.budget import NodeBudget
from treadle_shared.engine import BatchEngine, EngineFacts
from treadle_shared.errors import ConfigError
from treadle_shared.request import GenerationRequest
from treadle_shared.sampling import SamplingParams

_PLATEAU = 0.95  # the plateau begins within five per cent of the best throughput


@dataclass(frozen=True, slots=True, kw_only=True)
class ConcurrencyResult:
    """One level. Occupancy averages over ticks that decoded; ``tokens_per_tick`` counts every row that ran
    (prefill and decode) over every tick; ``peak_kv_bytes`` is read at the end of each tick, after finished sessions
    released; ``tokens_per_s`` counts generated tokens of wall time.
    """

    concurrency: int
    ticks: int
    avg_occupancy: float
    max_occupancy: int
    tokens_per_tick: float
    peak_kv_bytes: int
    kv_pressure: float
    tokens_per_s: float
    cache_misses: int
    rejected_admissions: int
    outputs: dict[str, list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConcurrencySweep:
    """All levels, lowest first, and the tokens that each job gave alone."""

    levels: list[ConcurrencyResult]
    baseline: dict[str, list[int]]

    @property
    def saturation_concurrency(self) -> int:
        """The lowest level whose average occupancy no higher level exceeds."""
        best = max(level.avg_occupancy for level in self.levels)
        return next(level.concurrency for level in self.levels if level.avg_occupancy >= best)

    @property
    def throughput_plateau(self) -> int:
        """The lowest level within five per cent of the best tokens/s."""
        best = max(level.tokens_per_s for level in self.levels)
        return next(level.concurrency for level in self.levels if level.tokens_per_s >= _PLATEAU * best)

    @property
    def corruption_free(self) -> bool:
        """Whether every job gave the same tokens at every level as it did alone."""
        return all(level.outputs == self.baseline for level in self.levels)

    @property
    def cache_misses(self) -> int:
        """Rows whose KV had been evicted, over all levels."""
        return sum(level.cache_misses for level in self.levels)

    @property
    def rejected_admissions(self) -> int:
        """Refused submissions, over all levels."""
        return sum(level.rejected_admissions for level in self.levels)


def run_concurrency_sweep(
    make_engine: Callable[[], BatchEngine],
    *,
    levels: Sequence[int] = (1, 2, 4, 8),
    jobs: int = 8,
    prompt_tokens: int = 4,
    new_tokens: int = 8,
    depth: int = 1,
    clock: Callable[[], float] = time.monotonic,
) -> ConcurrencySweep:
    """Run ``jobs`` fixed jobs at each level, on a fresh engine each, submitted together before the first tick.

    One prompt is prefilled a tick; answers ignore end-of-generation tokens, so each has ``new_tokens`` tokens.
    Raises ConfigError naming an argument that is not positive.
    """
    for name, value in (("jobs", jobs), ("prompt_tokens", prompt_tokens), ("new_tokens", new_tokens)):
        if value < 1:
            raise ConfigError(name, f"must be positive, not {value}")
    if not levels or min(levels) < 1:
        raise ConfigError("levels", f"must be positive, not {list(levels)}")
    ordered = sorted(set(levels))
    results = [_run_level(make_engine(), level, jobs, prompt_tokens, new_tokens, depth, clock) for level in ordered]
    if ordered[0] == 1:
        return ConcurrencySweep(levels=results, baseline=results[0].outputs)
    alone = _run_level(make_engine(), 1, jobs, prompt_tokens, new_tokens, depth, clock)
    return ConcurrencySweep(levels=results, baseline=alone.outputs)


def sweep_prompt(job: int, prompt_tokens: int, n_vocab: int) -> list[int]:
    """A job's fixed prompt: token ids that differ between jobs and positions, inside the vocabulary."""
    return [(7 + 131 * job + 17 * position + 3 * job * position) % n_vocab for position in range(prompt_tokens)]


def _run_level(
    engine: BatchEngine,
    level: int,
    jobs: int,
    prompt_tokens: int,
    new_tokens: int,
    depth: int,
    clock: Callable[[], float],
) -> ConcurrencyResult:
    facts = engine.facts
    budget = _level_budget(facts, level, jobs, prompt_tokens, new_tokens)
    scheduler = ContinuousBatchScheduler(engine, budget, depth=depth, clock=clock)
    started = clock()
    scheduler.submit_many([_request(job, prompt_tokens, new_tokens, facts.n_vocab) for job in range(jobs)])
    outputs = scheduler.run_to_completion()
    elapsed = max(clock() - started, 1e-9)
    scheduler.check()
    seen = scheduler.telemetry()
    return ConcurrencyResult(
        concurrency=level,
        ticks=seen.ticks_total,
        avg_occupancy=seen.batch_occupancy_avg,
        max_occupancy=seen.batch_occupancy_max,
        tokens_per_tick=(seen.prefill_tokens_total + seen.decode_tokens_total) / seen.ticks_total,
        peak_kv_bytes=scheduler.kv_peak_bytes,
        kv_pressure=scheduler.kv_peak_bytes / seen.kv_budget_bytes,
        tokens_per_s=sum(len(output.tokens) for output in outputs.values()) / elapsed,
        cache_misses=scheduler.cache_misses,
        rejected_admissions=seen.rejected_total,
        outputs={session_id: output.tokens for session_id, output in outputs.items()},
    )


def _level_budget(facts: EngineFacts, level: int, jobs: int, prompt_tokens: int, new_tokens: int) -> NodeBudget:
    return NodeBudget(
        weight_bytes=max(facts.weight_bytes, 1),
        kv_bytes=level * (prompt_tokens + new_tokens) * facts.kv_bytes_per_token,
        scratch_bytes=max(level * facts.scratch_bytes_per_session, 1),
        scratch_bytes_per_session=facts.scratch_bytes_per_session,
        queue_depth=jobs,
        max_active=level,
        max_prefill_tokens_per_tick=prompt_tokens,
    )


def _request(job: int, prompt_tokens: int, new_tokens: int, n_vocab: int) -> GenerationRequest:
    return GenerationRequest(
        session_id=f"job-{job}",
        prompt_tokens=sweep_prompt(job, prompt_tokens, n_vocab),
        max_new_tokens=new_tokens,
        params=SamplingParams(ignore_eos=True, seed=job),
    )
