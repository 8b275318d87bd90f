"""What the tick log costs: ``python benchmarks/tick_log_cost.py [FILE]``.

Prints percentiles, in microseconds of this thread's CPU time, of a turn of the broker's loop (plan, complete, expire,
take_promoted) for decoding sessions with and without a log, in alternation, and the bytes that a tick leaves in the
file.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from treadle_broker import Job, Plan, Scheduler
from treadle_broker.tick_file import TickFile
from treadle_broker.tick_log import RecordedScheduler, TickLog
from treadle_shared import EngineFacts, NodeBudget
from treadle_shared.concurrency import percentile
from treadle_shared.ticks import ResultRow, TickResult

LEVELS = (8, 32, 128)
ROUNDS = 4000
NEW_TOKENS = 1 << 19  # nobody ends while it is measured
LIMIT_BYTES = 1 << 30


def main() -> None:
    """Measure and print."""
    print(f"{'sessions':>8} {'':<10} {'p50':>8} {'p90':>8} {'p99':>8} {'mean':>8}   bytes a tick")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(folder) / "ticks.log"
        for sessions in LEVELS:
            _level(sessions, path)


def _level(sessions: int, path: Path) -> None:
    file = TickFile(path)
    log = TickLog(file, LIMIT_BYTES)
    plain, recorded = _loaded(sessions, None), _loaded(sessions, log)
    before = file.size
    seconds: dict[str, list[float]] = {"plain": [], "recorded": []}
    for _ in range(ROUNDS):
        seconds["plain"].append(_tick(plain))
        seconds["recorded"].append(_tick(recorded))
    for name, each in seconds.items():
        figures = [1e6 * percentile(each, share) for share in (0.5, 0.9, 0.99)] + [1e6 * sum(each) / len(each)]
        size = f"{(file.size - before) / ROUNDS:10.0f}" if name == "recorded" else ""
        print(f"{sessions:>8} {name:<10} " + " ".join(f"{figure:8.1f}" for figure in figures) + f"   {size}")
    log.close()


def _loaded(sessions: int, log: TickLog | None) -> Scheduler:
    facts = EngineFacts(
        recipe_fingerprint="bench",
        n_vocab=1000,
        context_tokens=1 << 20,
        max_sequences=sessions,
        kv_bytes_per_token=1,
        weight_bytes=1,
    )
    budget = NodeBudget(weight_bytes=1, kv_bytes=sessions << 20, scratch_bytes=1, max_active=sessions)
    scheduler = Scheduler(budget, facts) if log is None else RecordedScheduler(budget, facts, log)
    scheduler.worker_ready(facts, 0.0)
    jobs = [Job(client=f"c{n}", session_id="s", prompt_tokens=100, max_new_tokens=NEW_TOKENS) for n in range(sessions)]
    scheduler.submit(jobs, 0.0)
    for _ in range(sessions + 1):
        _tick(scheduler)
    return scheduler


def _tick(scheduler: Scheduler) -> float:
    """One turn of the broker's loop: the seconds inside the scheduler's calls."""
    started = time.thread_time()
    plan = scheduler.plan(started)
    planned = time.thread_time()
    assert plan is not None
    result = _answer(plan)
    answered = time.thread_time()
    scheduler.complete(result, answered)
    scheduler.expire(answered)
    scheduler.take_promoted()
    return planned - started + time.thread_time() - answered


def _answer(plan: Plan) -> TickResult:
    rows = [ResultRow(row.slot, row.gen, 7 if row.sample else -1) for row in (*plan.decode, *plan.prefill)]
    return TickResult(broker_id="b", worker_id="w", tick_id=plan.tick_id, rows=rows)


if __name__ == "__main__":
    main()
