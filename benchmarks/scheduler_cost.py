"""What the scheduler costs: ``python benchmarks/scheduler_cost.py``.

Prints percentiles, in microseconds, of plan + complete for 64 decoding sessions with 10 and with 10,000 sessions
queued behind them (in alternation), of a submission, and of a refusal by a full queue.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from treadle_broker import Job, Plan, Scheduler
from treadle_shared import EngineFacts, NodeBudget
from treadle_shared.concurrency import percentile
from treadle_shared.ticks import ResultRow, TickResult

SESSIONS = 64
ROUNDS = 1500
NEW_TOKENS = 1 << 19  # nobody ends while it is measured


def main() -> None:
    """Measure and print."""
    few, many = _loaded(10), _loaded(10_000)
    costs: dict[str, list[float]] = {"tick, 10 queued": [], "tick, 10,000 queued": []}
    for _ in range(ROUNDS):
        costs["tick, 10 queued"].append(_timed(lambda: _tick(few)))
        costs["tick, 10,000 queued"].append(_timed(lambda: _tick(many)))
    fresh = _scheduler(20_000)
    costs["submit"] = [_timed(lambda n=n: fresh.submit([_job(n)], 0.0)) for n in range(5000)]
    full = _loaded(1000, queue_depth=1000)
    costs["refuse"] = [_timed(lambda n=n: full.submit([_job(10**6 + n)], 0.0)) for n in range(5000)]
    print(f"{'microseconds':<22} {'p50':>8} {'p90':>8} {'p99':>8} {'max':>8}")
    for name, seconds in costs.items():
        figures = [1e6 * percentile(seconds, share) for share in (0.5, 0.9, 0.99, 1.0)]
        print(f"{name:<22} " + " ".join(f"{figure:8.1f}" for figure in figures))


def _loaded(queued: int, queue_depth: int = 20_000) -> Scheduler:
    """64 sessions that decode, and more that wait."""
    scheduler = _scheduler(queue_depth)
    for number in range(SESSIONS + queued):
        assert scheduler.submit([_job(number)], 0.0)[0].accepted
    for _ in range(SESSIONS + 1):
        _tick(scheduler)
    return scheduler


def _scheduler(queue_depth: int) -> Scheduler:
    facts = EngineFacts(
        recipe_fingerprint="bench",
        n_vocab=1000,
        context_tokens=1 << 20,
        max_sequences=SESSIONS,
        kv_bytes_per_token=1,
        weight_bytes=1,
    )
    budget = NodeBudget(
        weight_bytes=1,
        kv_bytes=SESSIONS << 20,
        scratch_bytes=1,
        queue_depth=queue_depth,
        queue_tokens=1 << 40,
        max_active=SESSIONS,
    )
    scheduler = Scheduler(budget, facts, depth=1)
    scheduler.worker_ready(facts, 0.0)
    return scheduler


def _job(number: int) -> Job:
    return Job(client=f"c{number % 50}", session_id=f"s{number}", prompt_tokens=100, max_new_tokens=NEW_TOKENS)


def _tick(scheduler: Scheduler) -> None:
    now = time.perf_counter()
    plan = scheduler.plan(now)
    assert plan is not None
    scheduler.complete(_answer(plan), now)


def _answer(plan: Plan) -> TickResult:
    rows = [ResultRow(row.slot, row.gen, 7 if row.sample else -1) for row in (*plan.decode, *plan.prefill)]
    return TickResult(broker_id="b", worker_id="w", tick_id=plan.tick_id, rows=rows)


def _timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
