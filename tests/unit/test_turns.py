"""Turns in the slots: who is parked for whom, what is kept of it, and what becomes of it when a tick fails."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hand_worker import (
    KV_BYTES,
    answer,
    budget,
    decoding,
    emitted,
    facts,
    failure,
    finish,
    job,
    key,
    node,
    planned,
    tick,
)

from treadle_broker import Emitted, Finished, Plan, Rebuilding, Scheduler
from treadle_broker.parking import worth_keeping
from treadle_broker.session import Session, State
from treadle_shared.admission import AdmissionReason
from treadle_shared.errors import ConfigError
from treadle_shared.outcome import DoneReason

PARKED_BYTES = 11  # of one token
SLICE = 4


def turning(depth: int = 1, can_park: bool = True, **changes: Any) -> Scheduler:
    """A node whose sessions take turns in two slots."""
    settings = {
        "kv_policy": "optimistic",
        "slots": 2,
        "max_active": 6,
        "slice_tokens": SLICE,
        "park_bytes": 10_000,
        "max_prefill_tokens_per_tick": 1000,
    }
    there = facts(parked_bytes_per_token=PARKED_BYTES if can_park else 0, max_sequences=2)
    return node(depth, there, **{**settings, **changes})


def plans(scheduler: Scheduler, limit: int = 10_000) -> list[Plan]:
    """Every plan until nobody is live, each answered as it comes."""
    made = []
    for _ in range(limit):
        plan = scheduler.plan(0.0)
        if plan is None:
            return made
        made.append(plan)
        scheduler.complete(answer(plan), 0.0)
        scheduler.check()
    raise AssertionError("still busy")


def parked(plan: Plan) -> list[str]:
    return [row.key.session_id for row in plan.park]


def restored(plan: Plan) -> list[str]:
    return [row.key.session_id for row in plan.restore]


def until_parked(scheduler: Scheduler) -> Plan:
    """The first plan that parks somebody, sent and not answered."""
    for _ in range(100):
        plan = planned(scheduler)
        if plan.park:
            return plan
        scheduler.complete(answer(plan), 0.0)
    raise AssertionError("nobody is parked")


# ---- whose turn it is


def test_nobody_is_parked_while_nobody_waits() -> None:
    scheduler = turning()
    scheduler.submit([job("a", new=50), job("b", new=50)], 0.0)
    assert not any(plan.park or plan.release for plan in plans(scheduler)[:-1])
    assert scheduler.telemetry(0.0).parks_total == 0


def test_sessions_beyond_the_slots_are_admitted_and_take_turns() -> None:
    scheduler = turning()
    decisions = scheduler.submit([job(name, new=3 * SLICE) for name in "abcdef"], 0.0)
    assert {decision.reason for decision in decisions} == {AdmissionReason.ADMITTED}
    assert scheduler.telemetry(0.0).active_sessions == 6
    rows: dict[str, list[int]] = {name: [] for name in "abcdef"}
    for number, plan in enumerate(plans(scheduler)):
        assert len(plan.decode) <= 2
        for name in decoding(plan):
            rows[name].append(number)
    pauses = {name: max(later - earlier for earlier, later in pairwise(seen)) for name, seen in rows.items()}
    assert all(len(seen) == 3 * SLICE - 1 for seen in rows.values())
    assert max(pauses.values()) <= 2 * (SLICE + 2) + 2, "each waits for two others in its slot"


def test_a_turn_lasts_a_slice_and_ends_with_it_when_somebody_waits() -> None:
    scheduler = turning(slots=1)
    scheduler.submit([job("a", new=1000), job("b", new=1000)], 0.0)
    turns: list[str] = []
    for _ in range(200):
        turns += emitted(tick(scheduler))
    lengths, last = [], 0
    for place in range(1, len(turns)):
        if turns[place] != turns[place - 1]:
            lengths.append(place - last)
            last = place
    assert len(lengths) > 20
    assert set(lengths) == {SLICE}


def test_the_longest_turn_ends_first_and_one_at_a_time() -> None:
    scheduler = turning()
    scheduler.submit([job("a", new=100)], 0.0)
    tick(scheduler)
    tick(scheduler)
    scheduler.submit([job("b", new=100), job("c", new=100), job("d", new=100)], 0.0)
    assert parked(until_parked(scheduler)) == ["a"]


def test_a_newcomer_waits_behind_those_that_wait_already() -> None:
    scheduler = turning(slots=1)
    scheduler.submit([job("a", new=100), job("b", new=100)], 0.0)
    plan = until_parked(scheduler)
    scheduler.complete(answer(plan), 0.0)
    scheduler.submit([job("c", new=100)], 0.0)
    order = [emitted(tick(scheduler))[0] for _ in range(4 * SLICE)]
    assert list(dict.fromkeys(order)) == ["b", "a", "c"]


def test_the_queue_holds_who_is_beyond_the_active_bound() -> None:
    scheduler = turning(max_active=3, queue_depth=1)
    reasons = [scheduler.submit([job(name)], 0.0)[0].reason for name in "abcde"]
    assert reasons == [AdmissionReason.ADMITTED] * 3 + [
        AdmissionReason.QUEUED,
        AdmissionReason.REJECTED_QUEUE_FULL,
    ]
    assert {event.key.session_id for event in finish(scheduler) if isinstance(event, Finished)} == set("abcd")


# ---- memory


def test_what_is_reserved_is_what_is_held_and_a_slice() -> None:
    scheduler = turning(kv_tokens=1000)
    scheduler.submit([job("a", prompt=10, new=500), job("b", prompt=20, new=500)], 0.0)
    tick(scheduler)
    ledger = scheduler._roster.ledger
    assert ledger.reserved == (10 + SLICE) + (20 + SLICE)
    for _ in range(3 * SLICE):
        tick(scheduler)
        assert all(0 <= ledger.held_for(one) - one.rows_planned <= SLICE for one in scheduler.sessions())


def test_when_kv_runs_out_somebody_is_parked_and_nobody_fails() -> None:
    scheduler = turning(kv_tokens=60)
    scheduler.submit([job("a", prompt=10, new=40), job("b", prompt=10, new=40)], 0.0)
    ends: list[Finished] = []
    for _ in range(500):
        plan = scheduler.plan(0.0)
        if plan is None:
            break
        assert scheduler._roster.ledger.reserved <= 60
        ends += [one for one in scheduler.complete(answer(plan), 0.0) if isinstance(one, Finished)]
        scheduler.check()
    assert [end.reason for end in ends] == [DoneReason.LENGTH] * 2
    assert scheduler.telemetry(0.0).parks_total > 0


def test_what_can_never_fit_is_refused() -> None:
    scheduler = turning(kv_tokens=50)
    assert scheduler.submit([job("a", prompt=10, new=41)], 0.0)[0].reason is AdmissionReason.REJECTED_KV_BUDGET
    assert scheduler.submit([job("b", prompt=10, new=40)], 0.0)[0].reason is AdmissionReason.ADMITTED


def test_parked_bytes_stay_inside_their_bound_and_the_rest_is_computed_anew() -> None:
    bound = 2 * 15 * PARKED_BYTES
    scheduler = turning(park_bytes=bound)
    scheduler.submit([job(name, prompt=8, new=3 * SLICE) for name in "abcdef"], 0.0)
    for plan in iter(lambda: scheduler.plan(0.0), None):
        assert scheduler._roster.parking.bytes_held <= bound
        events = scheduler.complete(answer(plan), 0.0)
        assert not any(isinstance(event, Rebuilding) for event in events), "computing anew is no fault"
    seen = scheduler.telemetry(0.0)
    assert 0 < seen.park_drops_total < seen.parks_total
    assert (seen.parked_sessions, scheduler._roster.parking.bytes_held) == (0, 0)


def test_an_engine_that_cannot_park_computes_anew() -> None:
    scheduler = turning(can_park=False)
    scheduler.submit([job(name, new=2 * SLICE) for name in "abcd"], 0.0)
    made = plans(scheduler)
    assert not any(plan.park or plan.restore for plan in made)
    assert scheduler.telemetry(0.0).park_drops_total == scheduler.telemetry(0.0).parks_total > 0
    assert any(row.n == 4 + SLICE for plan in made for row in plan.prefill), "prompt and answer are prefilled again"


@pytest.mark.parametrize(
    ("measured", "kept"),
    [
        ({}, True),
        ({"park_tokens_per_s": 1000.0, "prefill_tokens_per_s": 500.0}, True),
        ({"park_tokens_per_s": 400.0, "prefill_tokens_per_s": 500.0}, False),
        (
            {"park_tokens_per_s": 400.0, "prefill_tokens_per_s": 500.0, "replay_decode": True, "decode_tick_s": 1.0},
            True,
        ),
    ],
)
def test_kv_is_kept_where_moving_it_measures_cheaper(measured: dict[str, Any], kept: bool) -> None:
    session = Session(key("a"), job("a", prompt=10, new=50), 0.0)
    session.rows_planned, session.tokens_planned = 19, 10
    engine = facts(parked_bytes_per_token=1, max_sequences=4, **measured)
    assert worth_keeping(engine, session, engine.max_sequences) is kept
    assert not worth_keeping(msgspec.structs.replace(engine, parked_bytes_per_token=0), session, engine.max_sequences)


# ---- what the engine is told


def test_a_parked_session_comes_back_where_it_was() -> None:
    scheduler = turning(slots=1)
    scheduler.submit([job("a", new=20), job("b", new=20)], 0.0)
    made = plans(scheduler)
    park = next(plan for plan in made if parked(plan) == ["a"])
    back = next(plan for plan in made if restored(plan) == ["a"])
    assert park.park[0].slot in park.release
    assert back.restore[0].parked == park.park[0].gen
    last = [row for plan in made for row in plan.decode if row.gen == park.park[0].gen][-1]
    again = next(row for row in back.decode if row.key == key("a"))
    assert (again.gen, again.pos, again.forced) == (back.restore[0].gen, last.pos + 1, False)


def test_a_session_in_flight_is_parked_behind_its_row_and_returns_only_once_it_is_answered() -> None:
    scheduler = turning(depth=2, slots=1)
    scheduler.submit([job("a", new=20), job("b", new=20)], 0.0)
    waiting: list[Plan] = []
    for _ in range(100):
        while (plan := scheduler.plan(0.0)) is not None:
            waiting.append(plan)
        if any(plan.park for plan in waiting):
            break
        scheduler.complete(answer(waiting.pop(0)), 0.0)
    before, parking = waiting
    assert decoding(before) == ["a"]
    assert parked(parking) == ["a"]
    events = scheduler.complete(answer(before), 0.0)
    assert emitted(events) == ["a"], "the row in flight still counts"
    assert scheduler._roster.sessions[key("a")].state is State.PARKED


def test_an_answer_that_ends_in_flight_is_finished_and_its_place_given_up() -> None:
    scheduler = turning(depth=2, slots=1)
    scheduler.submit([job("a", new=20), job("b", new=20)], 0.0)
    waiting: list[Plan] = []
    while not any(plan.park for plan in waiting):
        while (plan := scheduler.plan(0.0)) is not None:
            waiting.append(plan)
        if not any(plan.park for plan in waiting):
            scheduler.complete(answer(waiting.pop(0)), 0.0)
    before, parking = waiting
    (end,) = scheduler.complete(answer(before, eog=["a"]), 0.0)
    assert isinstance(end, Finished)
    assert end.reason is DoneReason.STOP
    result = msgspec.structs.replace(answer(parking), unparked=[parking.park[0].gen])
    scheduler.complete(result, 0.0)
    finish(scheduler)
    assert scheduler.idle
    assert scheduler._roster.parking.bytes_held == 0


def test_a_sequence_that_could_not_be_parked_is_computed_anew() -> None:
    scheduler = turning(slots=1)
    scheduler.submit([job("a", new=2 * SLICE), job("b", new=2 * SLICE)], 0.0)
    plan = until_parked(scheduler)
    scheduler.complete(msgspec.structs.replace(answer(plan), unparked=[plan.park[0].gen]), 0.0)
    assert scheduler.telemetry(0.0).park_drops_total == 1
    ends = [event for event in finish(scheduler) if isinstance(event, Finished)]
    assert [end.reason for end in ends] == [DoneReason.LENGTH] * 2


# ---- faults and ends


def test_a_worker_cannot_give_back_bytes_that_its_tick_did_not_park() -> None:
    scheduler = turning(slots=1)
    scheduler.submit([job("a", new=2 * SLICE), job("b", new=2 * SLICE)], 0.0)
    first = until_parked(scheduler)
    scheduler.complete(answer(first), 0.0)
    held = scheduler._roster.parking.bytes_held
    assert held > 0
    plan = planned(scheduler)
    assert not plan.park
    scheduler.complete(msgspec.structs.replace(answer(plan), unparked=[first.park[0].gen]), 0.0)
    assert scheduler._roster.parking.bytes_held == held
    scheduler.check()


def test_a_refused_park_is_made_again() -> None:
    scheduler = turning(slots=1)
    scheduler.submit([job("a", new=20), job("b", new=20)], 0.0)
    refused = until_parked(scheduler)
    scheduler.complete(failure(refused, not_run=True), 0.0)
    again = planned(scheduler)
    assert again.resync
    assert again.park == refused.park
    assert set(refused.release) <= set(again.release)


def test_a_restore_that_never_ran_is_made_again() -> None:
    scheduler = turning(depth=2, slots=1)
    scheduler.submit([job("a", new=20), job("b", new=6)], 0.0)
    waiting: list[Plan] = []
    for _ in range(100):
        while (plan := scheduler.plan(0.0)) is not None:
            waiting.append(plan)
        if len(waiting) == 2 and waiting[1].restore:
            break
        scheduler.complete(answer(waiting.pop(0)), 0.0)
    first, restoring = waiting
    scheduler.complete(failure(first, not_run=True), 0.0)
    scheduler.complete(failure(restoring, not_run=True, code=0), 0.0)
    assert planned(scheduler).restore == restoring.restore


def test_a_parked_session_that_is_cancelled_is_forgotten_by_the_engine() -> None:
    scheduler = turning(slots=1)
    scheduler.submit([job("a", new=20), job("b", new=20)], 0.0)
    plan = until_parked(scheduler)
    scheduler.complete(answer(plan), 0.0)
    (end,) = scheduler.cancel(key("a"), 0.0)
    assert isinstance(end, Finished)
    assert planned(scheduler).discard == (plan.park[0].gen,)


def test_a_session_cancelled_before_its_park_was_refused_leaves_nothing_behind() -> None:
    scheduler = turning(slots=1)
    scheduler.submit([job("a", new=20), job("b", new=20)], 0.0)
    plan = until_parked(scheduler)
    scheduler.cancel(key("a"), 0.0)
    scheduler.complete(failure(plan, not_run=True), 0.0)
    assert plan.park[0].slot in planned(scheduler).release
    scheduler.cancel(key("b"), 0.0)
    assert scheduler._roster.parking.bytes_held == 0


def test_the_worker_takes_parked_states_with_it() -> None:
    scheduler = turning(slots=1)
    scheduler.submit([job("a", new=20), job("b", new=20)], 0.0)
    scheduler.complete(answer(until_parked(scheduler)), 0.0)
    assert scheduler.telemetry(0.0).parked_sessions == 1
    events = scheduler.worker_lost(0.0)
    assert {event.key.session_id for event in events if isinstance(event, Rebuilding)} == {"a", "b"}
    seen = scheduler.telemetry(0.0)
    assert (seen.parked_sessions, seen.parked_bytes, seen.active_sessions) == (0, 0, 2)
    scheduler.worker_ready(scheduler.facts, 0.0)
    done = finish(scheduler)
    assert {event.key.session_id for event in done if isinstance(event, Finished)} == {"a", "b"}
    tokens = [event for event in done if isinstance(event, Emitted) and event.key == key("a")]
    assert tokens[-1].index == 19


def test_a_parked_session_meets_its_deadline() -> None:
    scheduler = turning(slots=1)
    scheduler.submit([job("a", new=20, deadline=5.0), job("b", new=20)], 0.0)
    scheduler.complete(answer(until_parked(scheduler)), 0.0)
    (end,) = scheduler.expire(5.0)
    assert isinstance(end, Finished)
    assert (end.key, end.reason, end.detail) == (key("a"), DoneReason.DEADLINE, "deadline")
    finish(scheduler)


def test_parked_bytes_are_those_the_engine_tells() -> None:
    scheduler = turning(slots=1)
    scheduler.submit([job("a", new=20), job("b", new=20)], 0.0)
    plan = until_parked(scheduler)
    scheduler.complete(msgspec.structs.replace(answer(plan), parked_bytes=77), 0.0)
    seen = scheduler.telemetry(0.0)
    assert (seen.parked_bytes, seen.park_budget_bytes, seen.parked_sessions, seen.parks_total) == (77, 10_000, 1, 1)
    assert seen.kv_bytes == plan.prefill[0].n * KV_BYTES, "parked rows are not live"


# ---- budgets


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"kv_policy": "hopeful"}, "kv_policy"),
        ({"slots": 3}, "slots"),
        ({"slots": -1, "kv_policy": "optimistic"}, "slots"),
        ({"park_bytes": -1}, "park_bytes"),
        ({"slice_tokens": 0}, "slice_tokens"),
    ],
)
def test_a_budget_of_contradictions_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        budget(**changes)
    assert caught.value.key == named


def test_seats_and_active_sessions_of_a_budget() -> None:
    reserve = budget(max_active=8)
    optimistic = budget(max_active=8, slots=2, kv_policy="optimistic", scratch_bytes_per_session=400)
    assert (reserve.seats, reserve.effective_active_cap) == (8, 8)
    assert (optimistic.seats, optimistic.effective_active_cap) == (2, 8)
    assert budget(max_active=8, kv_policy="optimistic", scratch_bytes_per_session=2000).effective_active_cap == 0
