"""A scheduler whose ticks are answered by hand, for tests of what it decides."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from treadle_broker import Emitted, Event, Job, Plan, Scheduler, SessionKey
from treadle_shared.budget import NodeBudget
from treadle_shared.engine import EngineFacts
from treadle_shared.ticks import ResultRow, TickResult

KV_BYTES = 10  # of one token


def facts(**changes: Any) -> EngineFacts:
    """An engine that is never the bound."""
    settings: dict[str, Any] = {
        "recipe_fingerprint": "one",
        "n_vocab": 100,
        "context_tokens": 10_000,
        "max_sequences": 256,
        "kv_bytes_per_token": KV_BYTES,
        "weight_bytes": 7,
    }
    return EngineFacts(**{**settings, **changes})


def budget(kv_tokens: int = 100_000, **changes: Any) -> NodeBudget:
    """A budget that is never the bound, but for ``changes``."""
    settings: dict[str, Any] = {
        "weight_bytes": 1000,
        "kv_bytes": kv_tokens * KV_BYTES,
        "scratch_bytes": 1000,
        "max_active": 4,
    }
    return NodeBudget(**{**settings, **changes})


def node(depth: int = 1, engine: EngineFacts | None = None, recover_misses: bool = True, **changes: Any) -> Scheduler:
    """A scheduler whose worker is there."""
    engine = engine or facts()
    scheduler = Scheduler(budget(**changes), engine, depth=depth, recover_misses=recover_misses)
    scheduler.worker_ready(engine, 0.0)
    return scheduler


def job(name: str, prompt: int = 4, new: int = 8, client: str = "ann", **options: Any) -> Job:
    """A job of so many tokens."""
    return Job(client=client, session_id=name, prompt_tokens=prompt, max_new_tokens=new, **options)


def key(name: str, epoch: int = 0, client: str = "ann") -> SessionKey:
    """The key of a job's session."""
    return SessionKey(client, name, epoch)


def answer(plan: Plan, eog: Collection[str] = (), miss: Collection[str] = (), skip: Collection[str] = ()) -> TickResult:
    """Everything ran, in one part; the named sessions ended, had lost their KV, or were skipped."""
    rows, skipped = [], []
    for row in (*plan.decode, *plan.prefill):
        name = row.key.session_id
        if name in skip:
            skipped.append((row.slot, row.gen))
        elif name in miss:
            rows.append(ResultRow(row.slot, row.gen, -1, miss=True))
        else:
            rows.append(ResultRow(row.slot, row.gen, 7 if row.sample else -1, eog=row.sample and name in eog))
    return TickResult(broker_id="b", worker_id="w", tick_id=plan.tick_id, rows=rows, skipped=skipped)


def failure(plan: Plan, part: int = 0, not_run: bool = False, code: int = -1) -> TickResult:
    """A part whose batch failed, or a whole tick that was refused."""
    return TickResult(
        broker_id="b",
        worker_id="w",
        tick_id=plan.tick_id,
        part=part,
        not_run=not_run,
        error="injected",
        error_code=code,
    )


def part_of(plan: Plan, part: int, last: bool) -> TickResult:
    """The decode part (0) or the prefill part (1) of a tick that ran."""
    rows = [ResultRow(row.slot, row.gen, 7 if row.sample else -1) for row in (plan.decode, plan.prefill)[part]]
    return TickResult(broker_id="b", worker_id="w", tick_id=plan.tick_id, part=part, last=last, rows=rows)


def planned(scheduler: Scheduler, now: float = 0.0) -> Plan:
    """The next plan, which there must be."""
    plan = scheduler.plan(now)
    assert plan is not None
    return plan


def tick(scheduler: Scheduler, now: float = 0.0) -> list[Event]:
    """Plan one tick and answer it whole."""
    return scheduler.complete(answer(planned(scheduler, now)), now)


def finish(scheduler: Scheduler, now: float = 0.0, limit: int = 1000) -> list[Event]:
    """Answer ticks until there is none; everything that happened."""
    events: list[Event] = []
    for _ in range(limit):
        plan = scheduler.plan(now)
        if plan is None:
            scheduler.check()
            return events
        events += scheduler.complete(answer(plan), now)
    raise AssertionError(f"still busy after {limit} ticks")


def decoding(plan: Plan) -> list[str]:
    """Whose decode rows a plan holds, in its order."""
    return [row.key.session_id for row in plan.decode]


def prefilling(plan: Plan) -> dict[str, int]:
    """Whose prompts a plan prefills, and how many rows of each."""
    return {row.key.session_id: row.n for row in plan.prefill}


def emitted(events: list[Event]) -> list[str]:
    """Whose tokens came, in order."""
    return [event.key.session_id for event in events if isinstance(event, Emitted)]
