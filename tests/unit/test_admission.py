"""Admission: which answer a submission gets, what it says, and that a group is one decision."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hand_worker import KV_BYTES, budget, facts, finish, job, key, node, tick

from treadle_broker import Scheduler
from treadle_broker.admission import _MAX_REMEMBERED_IDS
from treadle_shared.admission import AdmissionReason

ADMITTED, QUEUED = AdmissionReason.ADMITTED, AdmissionReason.QUEUED
FULL = AdmissionReason.REJECTED_QUEUE_FULL


def _reasons(scheduler: Scheduler, *jobs: object) -> list[AdmissionReason]:
    return [scheduler.submit([one], 0.0)[0].reason for one in jobs]  # type: ignore[list-item]


# ---- the order of the checks


def test_what_waiting_cannot_cure_is_said_before_a_full_queue() -> None:
    scheduler = node(max_active=1, queue_depth=0, kv_tokens=50, engine=facts(context_tokens=60))
    scheduler.submit([job("a")], 0.0)
    assert _reasons(scheduler, job("a"), job("b", prompt=60), job("c", prompt=50), job("d")) == [
        AdmissionReason.REJECTED_DUPLICATE,
        AdmissionReason.REJECTED_CONTEXT,
        AdmissionReason.REJECTED_KV_BUDGET,
        FULL,
    ]


def test_a_draining_node_refuses_and_finishes_what_it_took() -> None:
    scheduler = node(max_active=1)
    scheduler.submit([job("a"), job("b")], 0.0)
    scheduler.drain()
    assert _reasons(scheduler, job("c")) == [AdmissionReason.REJECTED_DRAINING]
    refusal = scheduler.full_refusal("client", "c", 1, 0.0)
    assert refusal is not None
    assert refusal.reason is AdmissionReason.REJECTED_DRAINING
    finish(scheduler)
    assert scheduler.telemetry(0.0).done_total == 2


def test_no_scratch_for_a_single_session_refuses_everybody() -> None:
    decision = node(scratch_bytes=99, scratch_bytes_per_session=100).submit([job("a")], 0.0)[0]
    assert decision.reason is AdmissionReason.REJECTED_SCRATCH_BUDGET
    assert (decision.budget, decision.needed, decision.available) == ("scratch_bytes", 100, 99)


# ---- exact bounds


@pytest.mark.parametrize(("need", "reason"), [(50, ADMITTED), (51, AdmissionReason.REJECTED_KV_BUDGET)])
def test_a_session_may_need_the_whole_kv_budget_and_no_token_more(need: int, reason: AdmissionReason) -> None:
    scheduler = node(kv_tokens=50)
    assert _reasons(scheduler, job("a", prompt=need - 8)) == [reason]


@pytest.mark.parametrize(("need", "reason"), [(60, ADMITTED), (61, AdmissionReason.REJECTED_CONTEXT)])
def test_a_session_may_fill_the_context_and_no_token_more(need: int, reason: AdmissionReason) -> None:
    scheduler = node(engine=facts(context_tokens=60))
    assert _reasons(scheduler, job("a", prompt=need - 8)) == [reason]


def test_a_context_refusal_says_whether_the_prompt_alone_is_too_long() -> None:
    scheduler = node(engine=facts(context_tokens=60))
    messages = [scheduler.submit([job("a", prompt=prompt)], 0.0)[0].message for prompt in (59, 60)]
    assert messages == [
        "59 prompt tokens and max_tokens=8 exceed the 60 tokens that one session can hold",
        "60 prompt tokens leave no room for an answer in the 60 tokens that one session can hold",
    ]


def test_a_kv_refusal_says_what_is_free_now() -> None:
    scheduler = node(kv_tokens=50)
    scheduler.submit([job("a", prompt=10, new=10)], 0.0)
    decision = scheduler.submit([job("b", prompt=100)], 0.0)[0]
    assert (decision.needed, decision.available, decision.limit) == (108 * KV_BYTES, 30 * KV_BYTES, 50 * KV_BYTES)
    assert decision.retry_after_s is None, "waiting cannot help"


def test_the_queue_is_bounded_in_prompt_tokens_too() -> None:
    scheduler = node(max_active=1, queue_tokens=10)
    assert _reasons(scheduler, job("a"), job("b", prompt=6), job("c", prompt=4)) == [ADMITTED, QUEUED, QUEUED]
    decision = scheduler.submit([job("d", prompt=1)], 0.0)[0]
    assert decision.reason is FULL
    assert (decision.budget, decision.needed, decision.available, decision.limit) == ("queue_tokens", 1, 0, 10)


def test_the_tightest_of_slots_scratch_and_sequences_caps_what_is_active() -> None:
    for scheduler in (
        node(max_active=2),
        node(max_active=9, scratch_bytes=250, scratch_bytes_per_session=100),
        node(max_active=9, engine=facts(max_sequences=2)),
    ):
        assert _reasons(scheduler, job("a"), job("b"), job("c")) == [ADMITTED, ADMITTED, QUEUED]
        finish(scheduler)
        assert scheduler.telemetry(0.0).done_total == 3


# ---- order


def test_nobody_overtakes_a_head_that_does_not_fit_yet() -> None:
    scheduler = node(kv_tokens=40)
    assert _reasons(scheduler, job("big", prompt=22), job("head", prompt=22), job("small", prompt=1, new=1)) == [
        ADMITTED,
        QUEUED,
        QUEUED,
    ]
    for _ in range(7):
        tick(scheduler)
        assert [name.session_id for name, _ in scheduler.positions()] == ["head", "small"]
    tick(scheduler)
    tick(scheduler)
    assert list(scheduler.positions()) == []


def test_a_newcomer_waits_its_turn_even_when_it_would_fit() -> None:
    scheduler = node(kv_tokens=40)
    _reasons(scheduler, job("big", prompt=22), job("head", prompt=22))
    assert scheduler.submit([job("small", prompt=1, new=1)], 0.0)[0].reason is QUEUED


def test_the_position_counts_who_is_served_before() -> None:
    scheduler = node(max_active=1)
    scheduler.submit([job("running")], 0.0)
    wanted = {
        "a1": ("ann", 0),
        "a2": ("ann", 0),
        "b1": ("bob", 0),
        "vip": ("cyd", 5),
        "a3": ("ann", 0),
        "low": ("bob", -1),
    }
    told = {}
    for name, (client, priority) in wanted.items():
        told[name] = scheduler.submit([job(name, client=client, priority=priority)], 0.0)[0].position
    assert told == {"a1": 0, "a2": 1, "b1": 1, "vip": 0, "a3": 4, "low": 5}
    assert {name.session_id: ahead for name, ahead in scheduler.positions()} == {
        "vip": 0,
        "a1": 1,
        "b1": 2,
        "a2": 3,
        "a3": 4,
        "low": 5,
    }


# ---- ids and epochs


def test_the_same_id_of_two_clients_is_two_sessions() -> None:
    scheduler = node()
    assert _reasons(scheduler, job("a", client="ann"), job("a", client="bob")) == [ADMITTED, ADMITTED]
    assert scheduler.find("ann", "a") == key("a", client="ann")
    assert scheduler.find("bob", "a") == key("a", client="bob")
    assert scheduler.find("cyd", "a") is None


def test_an_id_used_again_gets_a_higher_epoch_and_old_keys_stay_dead() -> None:
    scheduler = node()
    scheduler.submit([job("a")], 0.0)
    scheduler.cancel(key("a"), 0.0)
    assert scheduler.submit([job("a")], 0.0)[0].epoch == 1
    assert scheduler.cancel(key("a", 0), 0.0) == []
    assert scheduler.find("ann", "a") == key("a", 1)


def test_an_epoch_is_not_used_again_after_its_id_was_forgotten() -> None:
    scheduler = node()
    for _ in range(3):
        newest = scheduler.submit([job("a")], 0.0)[0].epoch
        scheduler.cancel(key("a", newest), 0.0)
    for number in range(_MAX_REMEMBERED_IDS):
        epoch = scheduler.submit([job(f"other-{number}")], 0.0)[0].epoch
        scheduler.cancel(key(f"other-{number}", epoch), 0.0)
    assert scheduler.submit([job("a")], 0.0)[0].epoch > newest


# ---- groups


def test_a_group_that_does_not_fit_whole_leaves_no_trace_but_the_count() -> None:
    scheduler = node(max_active=1, queue_depth=1)
    decisions = scheduler.submit([job(name) for name in "abc"], 0.0)
    assert [decision.session_id for decision in decisions] == ["a", "b", "c"]
    assert {decision.reason for decision in decisions} == {FULL}
    seen = scheduler.telemetry(0.0)
    assert (seen.active_sessions, seen.queue_depth, seen.kv_bytes, seen.scratch_bytes) == (0, 0, 0, 0)
    assert (seen.submitted_total, seen.rejected_by_reason) == (3, {"REJECTED_QUEUE_FULL": 3})
    assert scheduler.take_promoted() == []
    scheduler.check()
    assert _reasons(scheduler, job("a"), job("b")) == [ADMITTED, QUEUED]


def test_every_refusal_of_a_group_explains_itself() -> None:
    scheduler = node(max_active=1, queue_depth=1)
    for decision in scheduler.submit([job(name) for name in "abcd"], 0.0):
        assert (decision.budget, decision.needed, decision.available, decision.limit) == ("queue_depth", 1, 0, 1)
        assert decision.retry_after_s is not None


def test_a_group_is_told_to_come_back_when_its_last_member_has_a_place() -> None:
    alone, together = node(max_active=1, queue_depth=0), node(max_active=1, queue_depth=0)
    for scheduler in (alone, together):
        scheduler.submit([job("running", new=100)], 0.0)
    waits = [alone.submit([job(name, new=100)], 0.0)[0].retry_after_s for name in "abc"]
    group = together.submit([job(name, new=100) for name in "abc"], 0.0)
    assert {decision.retry_after_s for decision in group} == {waits[-1]}
    assert waits == sorted(set(waits), key=float), "each later place opens later"  # type: ignore[arg-type]


def test_an_id_twice_in_a_group_refuses_the_group() -> None:
    scheduler = node()
    decisions = scheduler.submit([job("a"), job("b"), job("a")], 0.0)
    assert {decision.reason for decision in decisions} == {AdmissionReason.REJECTED_DUPLICATE}
    assert [decision.field for decision in decisions] == ["", "", "session_id"]
    assert scheduler.find("ann", "a") is None
    scheduler.check()


def test_a_group_is_admitted_and_queued_in_its_order() -> None:
    scheduler = node(max_active=2, queue_depth=2)
    assert [one.reason for one in scheduler.submit([job(name) for name in "abcd"], 0.0)] == [
        ADMITTED,
        ADMITTED,
        QUEUED,
        QUEUED,
    ]


def test_an_empty_group_is_no_decision() -> None:
    assert node().submit([], 0.0) == []


# ---- refusals before anything is tokenised


def test_an_early_refusal_is_the_one_that_submit_would_give_and_is_not_counted() -> None:
    scheduler = node(max_active=1, queue_depth=1)
    assert scheduler.full_refusal("client", "a", 1, 0.0) is None
    _reasons(scheduler, job("a"), job("b"))
    early = scheduler.full_refusal("client", "c", 1, 0.0)
    assert early is not None
    assert (early.reason, early.budget, early.available) == (FULL, "queue_depth", 0)
    assert scheduler.telemetry(0.0).rejected_total == 0
    scheduler.refuse(early)
    assert scheduler.telemetry(0.0).rejected_by_reason == {"REJECTED_QUEUE_FULL": 1}


def test_an_early_look_lets_through_what_a_free_slot_would_take() -> None:
    scheduler = node(max_active=1, queue_depth=0)
    assert scheduler.full_refusal("client", "a", 1, 0.0) is None
    assert _reasons(scheduler, job("a")) == [ADMITTED]
    assert scheduler.full_refusal("client", "b", 1, 0.0) is not None


# ---- before the worker is there, and when it changes


def test_sessions_are_taken_before_the_worker_is_there_and_run_once_it_is() -> None:
    scheduler = Scheduler(budget(), facts(recipe_fingerprint=""), depth=1)
    assert _reasons(scheduler, job("a"), job("b")) == [ADMITTED, ADMITTED]
    assert scheduler.plan(0.0) is None
    scheduler.worker_ready(facts(), 0.0)
    finish(scheduler)
    assert scheduler.telemetry(0.0).done_total == 2


def test_a_smaller_queue_refuses_with_nothing_available() -> None:
    scheduler = node(max_active=1, queue_depth=3)
    _reasons(scheduler, job("a"), job("b"), job("c"))
    scheduler.worker_lost(0.0)
    scheduler.worker_ready(facts(), 0.0, budget(max_active=1, queue_depth=1))
    decision = scheduler.submit([job("d")], 0.0)[0]
    assert (decision.reason, decision.available, decision.limit) == (FULL, 0, 1)


def test_a_newcomer_waits_behind_a_session_that_lost_its_slot() -> None:
    scheduler = node(max_active=2)
    _reasons(scheduler, job("a"), job("b"))
    scheduler.worker_lost(0.0)
    scheduler.worker_ready(facts(), 0.0, budget(max_active=1))
    assert _reasons(scheduler, job("c")) == [QUEUED]
    assert scheduler.telemetry(0.0).active_sessions == 2
    finish(scheduler)
    assert scheduler.telemetry(0.0).done_total == 3


# ---- a target for the first token


def timed(**changes: Any) -> Scheduler:
    """A node that prefills 100 tokens a second, and whose decode batches take 50 ms."""
    engine = facts(decode_tick_s=0.05, prefill_tokens_per_s=100.0)
    bounds = budget(**{"target_ttft_ms": 1000, "max_prefill_tokens_per_tick": 20, **changes})
    scheduler = Scheduler(bounds, engine, depth=1, eager=True)
    scheduler.worker_ready(engine, 0.0)
    return scheduler


def test_whom_the_prompts_ahead_would_make_late_is_refused_and_told_when_to_come_back() -> None:
    scheduler = timed()
    assert _reasons(scheduler, job("a", prompt=60)) == [ADMITTED]
    refused = scheduler.submit([job("b", prompt=60)], 0.0)[0]
    assert (refused.reason, refused.budget) == (FULL, "target_ttft_ms")
    assert (refused.needed, refused.available, refused.limit) == (600, 400, 1000)
    again = scheduler.submit([job("c", prompt=60)], 0.0)[0]
    assert 0.2 <= (refused.retry_after_s or 0.0) < (again.retry_after_s or 0.0)
    assert _reasons(scheduler, job("d", prompt=40)) == [ADMITTED]
    finish(scheduler)
    assert _reasons(scheduler, job("b", prompt=60)) == [ADMITTED]


def test_without_a_target_nobody_is_late() -> None:
    assert _reasons(timed(target_ttft_ms=0), job("a", prompt=600), job("b", prompt=600)) == [ADMITTED, ADMITTED]


def test_who_finds_nobody_ahead_is_taken_however_long_it_takes() -> None:
    scheduler = timed()
    assert _reasons(scheduler, job("a", prompt=900)) == [ADMITTED]
    tick(scheduler)
    assert scheduler.full_refusal("ann", "b", 1, 0.0) is not None


def test_requests_that_come_together_do_not_make_each_other_late() -> None:
    scheduler = timed()
    group = [job(name, prompt=90) for name in "abc"]
    assert [decision.reason for decision in scheduler.submit(group, 0.0)] == [ADMITTED] * 3
    late = [decision.reason for decision in scheduler.submit([job("d"), job("e")], 0.0)]
    assert late == [FULL, FULL]


def test_beside_streams_a_prompt_takes_its_decode_batches_too() -> None:
    scheduler = timed()
    scheduler.submit([job("a", new=1000)], 0.0)
    tick(scheduler)
    scheduler.submit([job("b", prompt=40)], 0.0)  # 0.4 s, and two batches of 50 ms
    refused = scheduler.submit([job("c", prompt=60)], 0.0)[0]
    assert (refused.needed, refused.available) == (750, 500)


def test_a_slot_that_has_to_open_first_counts() -> None:
    scheduler = timed(max_active=1)
    scheduler.submit([job("a", new=1000)], 0.0)
    tick(scheduler)
    refused = scheduler.submit([job("b", prompt=10)], 0.0)[0]
    assert (refused.budget, refused.available) == ("target_ttft_ms", 0)


def test_a_resumed_request_is_never_late() -> None:
    scheduler = timed()
    scheduler.submit([job("a", prompt=900)], 0.0)
    assert _reasons(scheduler, job("b", prompt=60, resumed=True)) == [ADMITTED]


def test_a_flood_is_late_before_it_is_tokenised() -> None:
    scheduler = timed()
    assert scheduler.full_refusal("ann", "b", 1, 0.0) is None
    scheduler.submit([job("a", prompt=100)], 0.0)
    refusal = scheduler.full_refusal("ann", "b", 1, 0.0)
    assert refusal is not None
    assert refusal.budget == "target_ttft_ms"


def test_a_long_prompt_that_is_refused_makes_nobody_else_wait_longer() -> None:
    scheduler = timed()
    scheduler.submit([job("a", prompt=60)], 0.0)
    long, short = (scheduler.submit([job(name, prompt=n)], 0.0)[0] for name, n in (("b", 9000), ("c", 60)))
    assert long.retry_after_s is not None
    assert short.retry_after_s is not None
    assert long.retry_after_s < short.retry_after_s < 3.0


def test_a_long_prompt_gets_in_between_short_ones() -> None:
    scheduler = timed()
    scheduler.submit([job("a", prompt=25)], 0.0)
    assert _reasons(scheduler, job("b", prompt=900)) == [ADMITTED]


def test_a_group_that_comes_too_late_waits_for_its_first() -> None:
    scheduler = timed()
    scheduler.submit([job("a", prompt=60)], 0.0)
    alone = timed()
    alone.submit([job("a", prompt=60)], 0.0)
    group = scheduler.submit([job("b", prompt=60), job("c", prompt=60)], 0.0)
    assert [one.retry_after_s for one in group] == [alone.submit([job("b", prompt=60)], 0.0)[0].retry_after_s] * 2


def test_a_flood_is_told_to_come_back_a_prompt_apart() -> None:
    scheduler = timed()
    scheduler.submit([job("a", prompt=120)], 0.0)
    refusals = [scheduler.full_refusal(client, "b", 1, 0.0) for client in "xyz"]
    times = [refusal.retry_after_s or 0.0 for refusal in refusals if refusal is not None]
    assert len(times) == 3
    assert all(later - sooner >= 1.2 for sooner, later in itertools.pairwise(times))


def test_prompts_that_wait_for_a_turn_are_ahead() -> None:
    scheduler = timed(kv_policy="optimistic", max_active=8, slots=1)
    scheduler.submit([job("a", new=500)], 0.0)
    tick(scheduler)
    assert _reasons(scheduler, job("b", prompt=90), job("c", prompt=90)) == [ADMITTED, FULL]
