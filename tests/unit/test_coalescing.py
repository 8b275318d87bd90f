"""Which answers may wait for the next one's, and that nobody waits for a first or a last token because of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hand_worker import answer, budget, decoding, facts, job, key, node, prefilling

from treadle_broker.node_facts import derive_budget
from treadle_broker.plan import Plan
from treadle_broker.scheduler import Scheduler
from treadle_broker.tick_builder import build_tick
from treadle_broker.tick_file import TickFile, TickReader
from treadle_broker.tick_log import RecordedScheduler, TickLog
from treadle_broker.tick_records import Planned
from treadle_shared.config import make_config
from treadle_shared.outcome import DoneReason
from treadle_shared.ticks import Timings

DECODE_S = 0.008


def short_ticks(depth: int = 2, decode_s: float = DECODE_S, **changes: Any) -> Scheduler:
    """A node whose decode batches take 8 ms and whose tokens may wait for 30."""
    engine = facts(decode_tick_s=decode_s, prefill_tokens_per_s=1e6)
    return node(depth=depth, engine=engine, **{"coalesce_ms": 30, **changes})


def all_planned(scheduler: Scheduler, now: float = 1.0) -> list[Plan]:
    """Every tick that may be sent now."""
    return list(iter(lambda: scheduler.plan(now), None))


def streaming(scheduler: Scheduler, *names: str, new: int = 500) -> list[Plan]:
    """Sessions whose prompts have run; the ticks in flight, none of which holds a prompt."""
    scheduler.submit([job(name, new=new) for name in names], 0.0)
    flying = all_planned(scheduler)
    while any(plan.prefill for plan in flying):
        flying = [*answered(scheduler, flying), *all_planned(scheduler)]
    return flying


def answered(scheduler: Scheduler, plans: list[Plan], decode_s: float = DECODE_S, now: float = 1.0) -> list[Plan]:
    """Answer the oldest tick, and those that wait with it; what is left in flight."""
    while plans:
        plan, *plans = plans
        scheduler.complete(msgspec.structs.replace(answer(plan), timings=Timings(total_s=decode_s)), now)
        if not plan.hold:
            break
    return plans


def shape(plans: list[Plan]) -> str:
    """``h`` for a tick whose answer may wait, ``.`` for one that leaves at once."""
    return "".join(".h"[plan.hold] for plan in plans)


@pytest.mark.parametrize(
    ("decode_s", "settings", "in_flight"),
    [
        (0.008, {}, "hh.h"),
        (0.0125, {}, "h.h"),
        (0.016, {}, ".."),
        (0.5, {}, ".."),
        (0.002, {}, "hhhhhhh.hhh"),  # three go on running while an answer is dealt with
        (0.0001, {}, "hhhhhhh.hhhhhhh."),
        (0.008, {"coalesce_ms": 0}, ".."),
        (0.0001, {"coalesce_ms": 0}, ".."),
        (0.008, {"target_itl_ms": 20}, "h.h"),
        (0.008, {"target_itl_ms": 15}, ".."),
        (0.008, {"target_itl_ms": 500}, "hh.h"),
    ],
)
def test_as_many_answers_leave_together_as_fit(decode_s: float, settings: dict[str, int], in_flight: str) -> None:
    """And no more is in flight than one group, and what the engine goes on with meanwhile."""
    scheduler = short_ticks(decode_s=decode_s, **settings)
    flying = streaming(scheduler, "a", "b")
    for _ in range(4):
        flying = [*answered(scheduler, flying, decode_s), *all_planned(scheduler)]
        assert shape(flying) == in_flight
        assert all(decoding(plan) == ["a", "b"] for plan in flying)


def test_a_slower_engine_ends_it() -> None:
    scheduler = short_ticks()
    flying = streaming(scheduler, "a")
    for _ in range(4):
        flying = [*answered(scheduler, flying, 0.1), *all_planned(scheduler)]
    assert shape(flying) == ".."


@pytest.mark.parametrize("settings", [{"depth": 1}, {"decode_s": 0.0}])
def test_each_answer_leaves_at_once(settings: dict[str, Any]) -> None:
    """Where each tick waits for the one before, and before anything was measured."""
    scheduler = short_ticks(**settings)
    flying = streaming(scheduler, "a")
    assert shape(flying) == "." * settings.get("depth", 2)


def test_ticks_in_which_nothing_ran_say_nothing_of_what_one_takes() -> None:
    scheduler = short_ticks()
    flying = streaming(scheduler, "a", "b")
    for plan in flying:
        scheduler.complete(answer(plan, skip=("a", "b")), 1.0)
    assert scheduler.marks().pace.decode_s == pytest.approx(DECODE_S)


def test_the_worker_and_the_log_are_told(tmp_path: Path) -> None:
    engine = facts(decode_tick_s=DECODE_S)
    log = TickLog(TickFile(tmp_path / "log"), 1 << 20)
    scheduler = RecordedScheduler(budget(coalesce_ms=30), engine, log)
    scheduler.worker_ready(engine, 0.0)
    held = next(plan for plan in streaming(scheduler, "a") if plan.hold)
    assert build_tick(held, "b", "w", lambda _key: pytest.fail("fed back by the worker")).hold
    log.close()
    with (tmp_path / "log").open("rb") as stream:
        reader = TickReader(stream)
        reader.opened()
        assert held.tick_id in {one.tick_id for one in reader.records() if isinstance(one, Planned) and one.hold}


def test_a_node_coalesces_as_it_is_configured() -> None:
    config = make_config({"engine": "reference", "coalesce_ms": 17})
    assert derive_budget(config, facts()).coalesce_ms == 17


def test_who_comes_is_in_the_next_tick_that_is_planned_and_nothing_is_held_beside_a_prompt() -> None:
    scheduler = short_ticks()
    flying = streaming(scheduler, "a")
    scheduler.submit([job("new", prompt=600)], 1.0)
    flying = answered(scheduler, flying)
    came = all_planned(scheduler)
    assert prefilling(came[0]) == {"new": 304}
    while "new" not in decoding(came[-1]):
        assert not any(plan.hold for plan in came)
        flying = [*answered(scheduler, [*flying, *came])]
        came = all_planned(scheduler)
    assert shape([*flying, *came]).startswith("..")  # its prompt's last chunk, and what runs beside it


@pytest.mark.parametrize("decode_s", [0.001, 0.002, DECODE_S, 0.05])
def test_what_follows_a_prompt_is_planned_when_it_runs(decode_s: float) -> None:
    scheduler = short_ticks(decode_s=decode_s)
    flying = streaming(scheduler, "a")
    for _ in range(3):
        flying = [*answered(scheduler, flying, decode_s), *all_planned(scheduler)]
    scheduler.submit([job("first", prompt=300)], 1.0)
    while not any(plan.prefill for plan in flying):
        flying = [*answered(scheduler, flying, decode_s), *all_planned(scheduler)]
    assert flying[-1].prefill
    assert len(flying) > 1
    scheduler.submit([job("second", prompt=300)], 1.0)
    assert not all_planned(scheduler)
    while not flying[0].prefill:
        scheduler.complete(answer(flying.pop(0)), 1.0)
    (following,) = all_planned(scheduler)
    assert "second" in prefilling(following)


def test_nothing_is_held_while_somebody_waits_for_a_slot() -> None:
    scheduler = short_ticks(max_active=2)
    flying = streaming(scheduler, "a", "b")
    scheduler.submit([job("waits")], 1.0)
    for _ in range(4):
        flying = [*answered(scheduler, flying), *all_planned(scheduler)]
    assert shape(flying) == ".."


def test_nothing_is_held_beside_a_session_that_its_text_may_end() -> None:
    scheduler = short_ticks()
    scheduler.submit([job("stops", new=500, watched=True)], 0.0)
    flying = streaming(scheduler, "a")
    for _ in range(4):
        flying = [*answered(scheduler, flying), *all_planned(scheduler)]
    assert shape(flying) == ".."


def test_a_last_token_does_not_wait() -> None:
    scheduler = short_ticks()
    flying = streaming(scheduler, "long")
    scheduler.submit([job("short", new=6)], 1.0)
    seen = []
    while not seen or "short" in decoding(seen[-1]) or len(seen) < 4:
        flying = [*answered(scheduler, flying), *all_planned(scheduler)]
        seen.append(flying[-1])
        ends = [plan for plan in flying if "short" in decoding(plan) and plan.decode[-1].pos == 4 + 6 - 2]
        assert not any(plan.hold for plan in ends)
        if ends:
            return
    raise AssertionError("it never ended")


def test_ticks_that_put_tokens_back_are_answered_at_once() -> None:
    engine = facts(decode_tick_s=DECODE_S, replay_decode=True)
    scheduler = node(depth=2, engine=engine, coalesce_ms=30)
    flying = streaming(scheduler, "a")
    for _ in range(6):
        flying = [*answered(scheduler, flying), *all_planned(scheduler)]
    scheduler.worker_lost(1.0)
    scheduler.worker_ready(engine, 1.0)
    flying, forced = all_planned(scheduler), 0
    while forced < 5:
        forced += sum(row.forced for plan in flying for row in plan.decode)
        assert not any(plan.hold for plan in flying if any(row.forced for row in plan.decode))
        flying = [*answered(scheduler, flying), *all_planned(scheduler)]


def test_a_slot_that_is_given_back_is_not_waited_for() -> None:
    scheduler = short_ticks()
    flying = streaming(scheduler, "a", "b")
    scheduler.cancel(key("a"), 1.0, DoneReason.CANCELLED)
    flying = answered(scheduler, flying)
    released, *_ = all_planned(scheduler)
    assert released.release
    assert not released.hold


@pytest.mark.parametrize("coalesce_ms", [0, 30])
def test_a_refused_client_is_told_the_same_time_whether_answers_leave_together_or_not(coalesce_ms: int) -> None:
    tick_s, now = 0.001, 0.0
    scheduler = short_ticks(decode_s=tick_s, coalesce_ms=coalesce_ms, max_active=1, queue_depth=0)
    scheduler.submit([job("a", new=1000)], now)
    flying, done = all_planned(scheduler, now), 0
    while done < 500:
        group = 1 + shape(flying).index(".")
        now += group * tick_s
        flying, done = answered(scheduler, flying, tick_s, now), done + group
        flying += all_planned(scheduler, now)
    refused = scheduler.submit([job("b", new=10)], now)[0]
    assert refused.retry_after_s == pytest.approx(1.5 * (1000 - done) * tick_s, rel=0.1)
