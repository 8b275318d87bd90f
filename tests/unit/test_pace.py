"""Prefill paced by a latency target: what it measures, what it allows, and what the scheduler makes of it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hand_worker import decoding, facts, job, node, part_of, planned, prefilling
from hypothesis import given
from hypothesis import strategies as st

from treadle_broker.node_facts import derive_budget
from treadle_broker.pace import LEAST_CHUNK, PaceMarks, PrefillPace
from treadle_broker.plan import Plan
from treadle_broker.replay import replay
from treadle_broker.scheduler import Scheduler
from treadle_broker.tick_file import TickFile
from treadle_broker.tick_log import RecordedScheduler, TickLog
from treadle_shared.config import make_config
from treadle_shared.engine import EngineFacts
from treadle_shared.errors import ConfigError
from treadle_shared.ticks import Timings

DECODE_S, TOKEN_S = 0.020, 0.002


def measured() -> PrefillPace:
    pace = PrefillPace()
    pace.decoded(DECODE_S)
    pace.prefilled(100, 100 * TOKEN_S)
    return pace


def test_what_the_decode_batch_leaves_of_the_target_is_spent_on_prefill() -> None:
    spent = DECODE_S + measured().budget(512, 0.150) * TOKEN_S
    assert 0.120 < spent <= 0.150


def test_nothing_measured_means_the_cap() -> None:
    assert PrefillPace().budget(512, 0.001) == 512


@given(
    st.lists(st.floats(0.0, 10.0), max_size=20),
    st.lists(st.tuples(st.integers(0, 512), st.floats(0.0, 10.0)), max_size=20),
    st.integers(1, 4096),
    st.floats(0.001, 60.0),
)
def test_the_budget_keeps_within_the_cap_and_never_starves_prefill(
    decodes: list[float], prefills: list[tuple[int, float]], cap: int, target_s: float
) -> None:
    pace = PrefillPace()
    for seconds in decodes:
        pace.decoded(seconds)
    for tokens, seconds in prefills:
        pace.prefilled(tokens, seconds)
    assert min(cap, LEAST_CHUNK) <= pace.budget(cap, target_s) <= cap


def test_a_slower_tick_counts_at_once_and_a_faster_one_slowly() -> None:
    slower, faster = measured(), measured()
    before = measured().budget(512, 0.150)
    slower.prefilled(100, 100 * TOKEN_S * 2)
    faster.prefilled(100, 100 * TOKEN_S / 2)
    assert slower.budget(512, 0.150) < 0.75 * before
    assert before < faster.budget(512, 0.150) < 1.25 * before


def test_a_warm_up_counts_until_something_was_measured() -> None:
    pace = PrefillPace()
    pace.seed(DECODE_S, 1 / TOKEN_S)
    assert pace.budget(512, 0.150) == measured().budget(512, 0.150)
    pace.prefilled(10, 1.0)
    known = pace.marks
    pace.seed(1.0, 1.0)
    assert pace.marks == known


@pytest.mark.parametrize("rate", [5e-324, 1e-9, 1e9])
@pytest.mark.parametrize("took", [0.0, 1e-310, 1e9])
def test_no_measurement_breaks_it(rate: float, took: float) -> None:
    pace = PrefillPace()
    pace.seed(1e9, rate)
    for _ in range(3):
        assert LEAST_CHUNK <= pace.budget(512, 0.150) <= 512
        pace.decoded(took)
        pace.prefilled(100, took)


@pytest.mark.parametrize("name", ["prefill_tokens_per_s", "decode_tick_s", "park_tokens_per_s"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_facts_that_are_no_measurement_are_refused(name: str, value: float) -> None:
    with pytest.raises(msgspec.ValidationError, match=name):
        msgspec.convert(msgspec.to_builtins(facts()) | {name: value}, EngineFacts)


def test_another_pace_goes_on_from_the_marks() -> None:
    pace = PrefillPace()
    pace.remember(measured().marks)
    assert pace.budget(512, 0.150) == measured().budget(512, 0.150)
    assert PrefillPace().marks == PaceMarks()


# ---- in the scheduler


def run(scheduler: Scheduler, plan: Plan, now: float) -> None:
    """Answer a tick in two parts that took what the model of this file says."""
    if plan.decode:
        took = Timings(total_s=DECODE_S)
        scheduler.complete(msgspec.structs.replace(part_of(plan, 0, not plan.prefill), timings=took), now)
    if plan.prefill:
        took = Timings(total_s=TOKEN_S * plan.prefill_tokens)
        scheduler.complete(msgspec.structs.replace(part_of(plan, 1, True), timings=took), now)


def stream_and_long_prompt(scheduler: Scheduler) -> list[Plan]:
    """Ticks from the moment a prompt of 700 tokens joins a running stream until its last chunk."""
    scheduler.submit([job("stream", prompt=40, new=500)], 0.0)
    for number in range(3):
        run(scheduler, planned(scheduler), number / 10)
    scheduler.submit([job("long", prompt=700, new=4)], 1.0)
    plans = []
    while not plans or "long" not in decoding(plans[-1]):
        plans.append(planned(scheduler, 1.0 + len(plans) / 10))
        run(scheduler, plans[-1], 1.05 + len(plans) / 10)
    return plans[:-1]


def test_a_long_prompt_beside_a_stream_is_cut_to_the_target() -> None:
    plans = stream_and_long_prompt(node(max_prefill_tokens_per_tick=512, target_itl_ms=150))
    assert all(decoding(plan) == ["stream"] for plan in plans)
    spent = [DECODE_S + TOKEN_S * plan.prefill_tokens for plan in plans]
    assert max(spent) <= 0.150
    assert sum(plan.prefill_tokens for plan in plans) == 700
    assert len(plans) <= 14  # most of the target is used


def test_without_a_target_only_the_cap_holds() -> None:
    plans = stream_and_long_prompt(node(max_prefill_tokens_per_tick=512))
    assert [plan.prefill_tokens for plan in plans] == [352, 348]  # as few chunks as it allows, evenly


@pytest.mark.parametrize(("longest_ms", "tokens"), [(3000, 60), (5000, 100), (1, LEAST_CHUNK)])
def test_no_tick_computes_prompts_for_longer_than_it_may(longest_ms: int, tokens: int) -> None:
    bursts = {"max_prefill_tokens_per_tick": 512, "burst_prefill_tokens_per_tick": 512}
    scheduler = node(longest_prefill_ms=longest_ms, **bursts)
    scheduler.submit([job("a", prompt=4000)], 0.0)
    sizes = []
    for number in range(4):
        plan = planned(scheduler)
        sizes.append(plan.prefill_tokens)
        took = Timings(total_s=plan.prefill_tokens / 20)
        scheduler.complete(msgspec.structs.replace(part_of(plan, 1, True), timings=took), 30.0 * number)
    assert sizes[0] == 2048  # nothing is known yet
    assert sizes[1:] == [tokens] * 3


@pytest.mark.parametrize(
    ("timeout_s", "longest_ms"), [(0.001, 1), (0.6, 100), (6.0, 1000), (30.0, 5000), (600.0, 5000)]
)
def test_a_tick_that_prefills_stays_far_below_the_one_that_ends_its_worker(timeout_s: float, longest_ms: int) -> None:
    config = make_config({"engine": "reference", "tick_timeout_s": timeout_s})
    assert derive_budget(config, facts()).longest_prefill_ms == longest_ms


def test_a_small_chunk_says_nothing_of_what_a_token_costs() -> None:
    pace = measured()
    pace.prefilled(LEAST_CHUNK - 1, 5.0)
    assert pace.marks == measured().marks


def test_one_frozen_tick_is_forgotten_even_where_every_chunk_is_small() -> None:
    pace = measured()
    pace.prefilled(20, 25.0)
    assert pace.within(512, 2.0) == LEAST_CHUNK
    for _ in range(60):
        pace.prefilled(LEAST_CHUNK - 1, (LEAST_CHUNK - 1) * TOKEN_S)
    assert pace.within(512, 2.0) == 512


def test_prompts_run_at_the_cap_while_nobody_waits_for_a_token() -> None:
    scheduler = node(max_prefill_tokens_per_tick=256, target_itl_ms=50)
    scheduler.submit([job("a", prompt=600)], 0.0)
    sizes = []
    for number in range(3):
        plan = planned(scheduler)
        sizes.append(prefilling(plan)["a"])
        run(scheduler, plan, number / 10)
    assert sizes == [256, 256, 88]


def test_those_that_come_together_start_together() -> None:
    scheduler = node(max_active=9, max_prefill_tokens_per_tick=64, burst_prefill_tokens_per_tick=256)
    scheduler.submit([job(f"s{number}", prompt=64, new=500) for number in range(9)], 0.0)
    plans = []
    while not plans or plans[-1].prefill:
        plans.append(planned(scheduler))
        run(scheduler, plans[-1], len(plans) / 10)
    sizes = [(len(plan.decode), plan.prefill_tokens) for plan in plans]
    assert sizes == [(0, 9 * 64), (9, 0)]


def test_while_nobody_streams_a_tick_takes_four_bursts() -> None:
    scheduler = node(max_active=9, max_prefill_tokens_per_tick=16, burst_prefill_tokens_per_tick=32)
    scheduler.submit([job(f"s{number}", prompt=64, new=500) for number in range(9)], 0.0)
    plan = planned(scheduler)
    assert (plan.decode, plan.prefill_tokens) == ((), 4 * 32)
    run(scheduler, plan, 0.1)
    plan = planned(scheduler)
    assert (len(plan.decode), plan.prefill_tokens) == (2, 32)


@pytest.mark.parametrize(
    ("waiting", "streams", "prefilled"),
    [(1, 1, 64), (1, 8, 64), (2, 7, 64), (3, 6, 85), (4, 5, 153), (5, 4, 256), (6, 3, 256)],
)
def test_the_burst_is_spent_by_how_many_wait_for_each_that_streams(waiting: int, streams: int, prefilled: int) -> None:
    scheduler = node(max_active=9, max_prefill_tokens_per_tick=64, burst_prefill_tokens_per_tick=256)
    scheduler.submit([job(f"old{number}", prompt=2, new=500) for number in range(streams)], 0.0)
    run(scheduler, planned(scheduler), 0.1)
    scheduler.submit([job(f"new{number}", prompt=500, new=500) for number in range(waiting)], 0.2)
    plan = planned(scheduler, 0.3)
    assert (len(plan.decode), plan.prefill_tokens) == (streams, prefilled)


@pytest.mark.parametrize(
    ("streams", "burst", "prefilled"),
    [(1, 256, 20), (10, 256, 20), (15, 256, 30), (40, 256, 80), (40, 48, 48), (40, 0, 20)],
)
def test_more_streams_leave_a_prompt_more_of_a_tick_but_no_more_than_a_burst(
    streams: int, burst: int, prefilled: int
) -> None:
    plan = with_a_prompt_beside(streams, cap=20, burst=burst)
    assert (len(plan.decode), plan.prefill_tokens) == (streams, prefilled)


def test_more_streams_leave_a_prompt_no_more_than_runs_in_half_a_second() -> None:
    plan = with_a_prompt_beside(40, cap=150, burst=2000)
    assert TOKEN_S * plan.prefill_tokens == pytest.approx(0.48)  # two even chunks; 600 tokens were allowed otherwise


def with_a_prompt_beside(streams: int, cap: int, burst: int) -> Plan:
    """The tick after a prompt of 480 tokens has come to so many streams."""
    limits = {"max_prefill_tokens_per_tick": cap, "burst_prefill_tokens_per_tick": burst}
    scheduler = node(max_active=streams + 1, **limits)
    scheduler.submit([job(f"old{number}", prompt=2, new=500) for number in range(streams)], 0.0)
    now = 0.0
    while len((plan := planned(scheduler, now)).decode) < streams:
        run(scheduler, plan, now := now + 0.1)
    run(scheduler, plan, now)
    scheduler.submit([job("new", prompt=480, new=4)], now)
    return planned(scheduler, now + 0.1)


def test_a_few_streams_do_not_hold_many_back() -> None:
    scheduler = node(max_active=9, max_prefill_tokens_per_tick=64, burst_prefill_tokens_per_tick=256)
    scheduler.submit([job("first", prompt=64, new=500)], 0.0)
    run(scheduler, planned(scheduler), 0.1)
    scheduler.submit([job(f"s{number}", prompt=64, new=500) for number in range(3)], 0.2)
    plan = planned(scheduler, 0.3)
    assert (decoding(plan), plan.prefill_tokens) == (["first"], 3 * 64)


def test_a_target_that_cannot_be_met_leaves_prompts_their_least_chunk() -> None:
    plans = stream_and_long_prompt(node(max_prefill_tokens_per_tick=512, target_itl_ms=1))
    assert {plan.prefill_tokens for plan in plans[:-1]} == {LEAST_CHUNK}


def test_a_paced_life_is_replayed_without_a_difference(tmp_path: Path) -> None:
    paced = node(max_prefill_tokens_per_tick=512, target_itl_ms=150)
    budget, facts = paced._roster.budget, paced.facts
    recorded = RecordedScheduler(budget, facts, TickLog(TickFile(tmp_path / "ticks.log"), 1 << 20), depth=1)
    recorded.worker_ready(facts, 0.0)
    stream_and_long_prompt(recorded)
    assert replay(tmp_path / "ticks.log").clean


@pytest.mark.parametrize("value", [-1, 60_001, 2.5, "soon"])
def test_an_absurd_target_is_refused_by_its_key(value: object) -> None:
    with pytest.raises(ConfigError, match="target_itl_ms"):
        make_config({"target_itl_ms": value})
