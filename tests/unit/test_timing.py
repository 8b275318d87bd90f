"""When ticks are planned: not before they must be, so that whoever comes meanwhile is in them."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
import pytest
from hand_worker import answer, budget, facts, job, key, part_of, planned, prefilling

from treadle_broker import Plan, Scheduler
from treadle_broker.prefix_hash import PrefixHasher
from treadle_shared.engine import EngineFacts
from treadle_shared.ticks import Timings

ENGINE = facts(prefill_tokens_per_s=100.0, decode_tick_s=0.01)  # a prompt of 100 tokens takes a second


def sharing_a_node(engine: EngineFacts = ENGINE, *, eager: bool = False, **changes: Any) -> Scheduler:
    """Four slots, two ticks in flight, as many prompt tokens a tick as there are; but for ``changes`` of the budget."""
    settings = {"max_prefill_tokens_per_tick": 1000, "burst_prefill_tokens_per_tick": 1000}
    limits = budget(**{**settings, **changes})
    scheduler = Scheduler(limits, engine, depth=2, eager=eager)
    scheduler.worker_ready(engine, 0.0)
    return scheduler


def ran(scheduler: Scheduler, plan: Plan, now: float) -> None:
    """The plan ran whole, as fast as the engine is said to be."""
    timings = Timings(total_s=plan.prefill_tokens / 100 if plan.prefill else 0.01)
    result = part_of(plan, 1, True) if plan.prefill and not plan.decode else answer(plan)
    scheduler.complete(msgspec.structs.replace(result, timings=timings), now)


def test_one_alone_waits_a_hundredth_of_its_prefill() -> None:
    scheduler = sharing_a_node()
    scheduler.submit([job("a", prompt=100)], 5.0)
    assert scheduler.plan(5.0) is None
    assert scheduler.next_plan() == pytest.approx(5.01)
    assert scheduler.plan(5.009) is None
    assert prefilling(planned(scheduler, 5.01)) == {"a": 100}
    assert scheduler.next_plan() is None


def test_those_who_come_one_after_the_other_start_together() -> None:
    scheduler = sharing_a_node()
    for number, name in enumerate("abc"):
        scheduler.submit([job(name, prompt=100)], 0.009 * number)
        assert scheduler.plan(0.009 * number) is None
    assert scheduler.next_plan() == pytest.approx(0.05)  # a fiftieth would be more than anybody waits
    assert prefilling(planned(scheduler, 0.05)) == {"a": 100, "b": 100, "c": 100}


def test_nobody_is_waited_for_where_no_slot_is_left() -> None:
    scheduler = sharing_a_node()
    scheduler.submit([job(name, prompt=50) for name in "abcd"], 0.0)
    assert len(planned(scheduler).prefill) == 4


def test_nobody_is_waited_for_where_no_kv_is_left_for_another() -> None:
    scheduler = sharing_a_node(kv_tokens=250)
    scheduler.submit([job(name, prompt=100) for name in "ab"], 0.0)
    assert len(planned(scheduler).prefill) == 2


def test_nobody_is_waited_for_while_draining() -> None:
    scheduler = sharing_a_node()
    scheduler.submit([job("a", prompt=100)], 0.0)
    scheduler.drain()
    planned(scheduler)


def test_nobody_waits_while_a_prompt_is_under_way() -> None:
    scheduler = sharing_a_node(max_prefill_tokens_per_tick=100, burst_prefill_tokens_per_tick=0)
    scheduler.submit([job("a", prompt=300)], 0.0)
    ran(scheduler, planned(scheduler, 1.0), 2.0)
    scheduler.submit([job("b", prompt=100), job("c", prompt=100)], 2.0)
    assert prefilling(planned(scheduler, 2.0)) == {"a": 100}


def test_what_can_be_copied_is_not_waited_for() -> None:
    engine = facts(prefill_tokens_per_s=100.0, decode_tick_s=0.01, can_copy=True)
    scheduler = sharing_a_node(engine, cache_slots=2, prefix_block_tokens=4)
    tokens = array("i", range(102))
    like = {"prompt": 102, "new": 2, "prefix": PrefixHasher("node", 4).chain("ann", "").grow(tokens)}
    scheduler.submit([job("a", **like)], 0.0)
    ran(scheduler, planned(scheduler, 1.0), 2.0)
    for now in (2.1, 2.2):  # its last token, and what it leaves is kept
        ran(scheduler, planned(scheduler, now), now)
    scheduler.submit([job("b", **like)], 3.0)
    assert scheduler.plan(3.0) is None
    assert scheduler.next_plan() == pytest.approx(3.0002)  # of two rows


def test_the_queue_moves_up_while_a_tick_is_put_off() -> None:
    scheduler = sharing_a_node(max_active=2)
    scheduler.submit([job("a", prompt=200), job("b", prompt=50), job("c", prompt=50)], 0.0)
    planned(scheduler)
    assert scheduler.telemetry(0.0).queue_depth == 1
    scheduler.cancel(key("b"), 0.5)
    assert scheduler.plan(0.5) is None
    assert scheduler.next_plan() is not None
    assert scheduler.telemetry(0.5).queue_depth == 0


def test_nobody_is_waited_for_while_nothing_is_known_of_the_engine() -> None:
    scheduler = sharing_a_node(facts())
    scheduler.submit([job("a", prompt=100)], 0.0)
    planned(scheduler)


def test_an_eager_scheduler_puts_nothing_off() -> None:
    scheduler = sharing_a_node(eager=True)
    scheduler.submit([job("a", prompt=100)], 0.0)
    planned(scheduler)
    scheduler.submit([job("b", prompt=100)], 0.0)
    planned(scheduler)


def test_few_streams_go_on_while_many_wait_for_more() -> None:
    scheduler = sharing_a_node()
    scheduler.submit([job("a", prompt=100, new=9)], 0.0)
    ran(scheduler, planned(scheduler, 1.0), 2.0)
    scheduler.submit([job("b", prompt=100), job("c", prompt=100)], 2.0)
    plan = planned(scheduler, 2.0)
    assert (len(plan.decode), len(plan.prefill)) == (1, 0)
    assert scheduler.next_plan() == pytest.approx(2.04)
    ran(scheduler, plan, 2.01)
    plan = planned(scheduler, 2.04)
    assert (len(plan.decode), len(plan.prefill)) == (1, 2)


def test_a_newcomer_among_as_many_streams_waits_for_nobody() -> None:
    scheduler = sharing_a_node()
    scheduler.submit([job("a", prompt=100, new=9)], 0.0)
    ran(scheduler, planned(scheduler, 1.0), 2.0)
    scheduler.submit([job("b", prompt=100)], 2.0)
    plan = planned(scheduler, 2.0)
    assert (len(plan.decode), len(plan.prefill)) == (1, 1)


def test_beside_a_long_prefill_the_next_tick_is_planned_shortly_before_its_end() -> None:
    scheduler = sharing_a_node()
    scheduler.submit([job("a", prompt=200)], 0.0)
    first = planned(scheduler, 10.0)
    assert scheduler.plan(10.0) is None
    assert scheduler.next_plan() == pytest.approx(11.5)  # two seconds, less a quarter
    scheduler.submit([job("b", prompt=60)], 11.0)
    assert scheduler.plan(11.4) is None
    second = planned(scheduler, 11.5)
    assert (len(second.decode), prefilling(second)) == (1, {"b": 60})
    ran(scheduler, first, 12.0)
    assert scheduler.plan(12.0) is None
    assert scheduler.next_plan() == pytest.approx(12.45)  # counted from when its predecessor was answered


def test_a_tick_that_ends_early_is_followed_at_once() -> None:
    scheduler = sharing_a_node()
    scheduler.submit([job("a", prompt=200)], 0.0)
    first = planned(scheduler, 10.0)
    assert scheduler.plan(10.2) is None
    ran(scheduler, first, 10.3)
    assert len(planned(scheduler, 10.3).decode) == 1


def test_a_short_tick_is_followed_at_once() -> None:
    scheduler = sharing_a_node()
    scheduler.submit([job("a", prompt=5)], 0.0)
    planned(scheduler, 1.0)
    assert len(planned(scheduler, 1.0).decode) == 1


def test_a_lost_worker_leaves_nothing_to_wait_for() -> None:
    scheduler = sharing_a_node()
    scheduler.submit([job("a", prompt=200)], 0.0)
    planned(scheduler, 10.0)
    assert scheduler.plan(10.0) is None
    scheduler.worker_lost(10.1)
    assert scheduler.plan(10.1) is None
    assert scheduler.next_plan() is None
    scheduler.worker_ready(ENGINE, 10.2)
    assert prefilling(planned(scheduler, 10.2)) == {"a": 200}
