"""What the scheduler does tick by tick: slots that change hands, rows in flight, failures, and engines that change."""

from __future__ import annotations

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
    part_of,
    planned,
    prefilling,
    tick,
)

from treadle_broker import Emitted, Finished, Plan, Promoted, Rebuilding, Scheduler
from treadle_shared.engine import EngineFacts
from treadle_shared.outcome import DoneReason
from treadle_shared.ticks import ResultRow


def _ends(events: list[object]) -> dict[str, tuple[DoneReason, str]]:
    return {event.key.session_id: (event.reason, event.detail) for event in events if isinstance(event, Finished)}


def _rebuilt(events: list[object]) -> list[str]:
    return [event.key.session_id for event in events if isinstance(event, Rebuilding)]


def _slots(plan: Plan) -> dict[str, int]:
    return {row.key.session_id: row.slot for row in (*plan.decode, *plan.prefill)}


# ---- decode first, bounded prefill


def test_a_tick_decodes_everybody_and_prefills_up_to_the_cap() -> None:
    scheduler = node(max_active=4, max_prefill_tokens_per_tick=6)
    scheduler.submit([job("a"), job("b"), job("c")], 0.0)
    plans = []
    for _ in range(3):
        plans.append(planned(scheduler))
        scheduler.complete(answer(plans[-1]), 0.0)
    assert [(decoding(plan), prefilling(plan)) for plan in plans] == [
        ([], {"a": 4, "b": 2}),
        (["a"], {"b": 2, "c": 4}),
        (["a", "b", "c"], {}),
    ]


def test_newcomers_do_not_push_an_old_session_out_of_a_small_batch() -> None:
    scheduler = node(max_active=3, max_batch_size=1, max_prefill_tokens_per_tick=100)
    scheduler.submit([job("old", new=50)], 0.0)
    tick(scheduler)
    served = 0
    for number in range(60):
        scheduler.submit([job(f"new-{number}", prompt=1, new=2)], 0.0)
        served += "old" in emitted(tick(scheduler))
    assert served >= 60 // 3


def test_rotation_serves_all_alike_when_there_are_more_sessions_than_rows() -> None:
    scheduler = node(max_active=7, max_batch_size=3, max_prefill_tokens_per_tick=100)
    scheduler.submit([job(f"s{number}", new=1000) for number in range(7)], 0.0)
    tick(scheduler)
    rows: dict[str, int] = {}
    for _ in range(70):
        plan = planned(scheduler)
        assert len(plan.decode) == 3
        assert [row.slot for row in plan.decode] == sorted(row.slot for row in plan.decode)
        for name in decoding(plan):
            rows[name] = rows.get(name, 0) + 1
        scheduler.complete(answer(plan), 0.0)
    assert set(rows.values()) == {30}


# ---- two in flight


def test_depth_bounds_the_ticks_in_flight() -> None:
    for depth in (1, 2):
        scheduler = node(depth=depth)
        scheduler.submit([job("a")], 0.0)
        assert sum(scheduler.plan(0.0) is not None for _ in range(5)) == depth


def test_the_slot_of_a_last_token_is_refilled_by_the_next_tick() -> None:
    scheduler = node(depth=2, max_active=1)
    scheduler.submit([job("a", new=2), job("b", new=1)], 0.0)
    plans = [planned(scheduler), planned(scheduler)]
    assert decoding(plans[1]) == ["a"]
    assert scheduler.telemetry(0.0).kv_bytes == 0, "a left the ledger with its last row"
    scheduler.complete(answer(plans[0]), 0.0)
    third = planned(scheduler)
    assert (third.release, prefilling(third)) == ((0,), {"b": 4})
    assert _slots(third) == {"b": 0}
    seen = scheduler.telemetry(0.0)
    assert (seen.active_sessions, seen.done_total) == (2, 0)
    assert _ends(scheduler.complete(answer(plans[1]), 0.0)) == {"a": (DoneReason.LENGTH, "")}


def test_a_row_behind_an_end_of_generation_is_skipped_and_counts_nowhere() -> None:
    scheduler = node(depth=2)
    scheduler.submit([job("a"), job("b")], 0.0)
    first, second = planned(scheduler), planned(scheduler)
    events = scheduler.complete(answer(first, eog={"a"}), 0.0)
    assert _ends(events) == {"a": (DoneReason.STOP, "eog")}
    assert emitted(events) == ["b"]
    result = answer(second, skip={"a"})
    events = scheduler.complete(msgspec.structs.replace(result, kv_tokens=4 + 5), 0.0)
    assert emitted(events) == ["b"]
    assert scheduler.kv_drift_rows == 0
    assert scheduler.telemetry(0.0).decode_tokens_total == 1
    assert scheduler.telemetry(0.0).batch_occupancy_last == 1


def test_a_cancelled_sessions_row_in_flight_is_run_and_dropped() -> None:
    scheduler = node(depth=2)
    scheduler.submit([job("a"), job("b")], 0.0)
    plans = [planned(scheduler), planned(scheduler)]
    assert _ends(scheduler.cancel(key("a"), 0.0)) == {"a": (DoneReason.CANCELLED, "")}
    assert [emitted(scheduler.complete(answer(plan), 0.0)) for plan in plans] == [["b"], ["b"]]
    assert planned(scheduler).release == (0,)


def test_a_slot_may_change_hands_while_a_row_of_its_last_session_is_in_flight() -> None:
    scheduler = node(depth=2, max_active=1)
    scheduler.submit([job("a")], 0.0)
    plans = [planned(scheduler), planned(scheduler)]
    scheduler.cancel(key("a"), 0.0)
    scheduler.submit([job("a", new=3)], 0.0)
    scheduler.complete(answer(plans[0]), 0.0)
    third = planned(scheduler)
    assert third.release == (0,)
    assert scheduler.complete(answer(plans[1]), 0.0) == [], "the token of epoch 0 is nobody's"
    events = scheduler.complete(answer(third), 0.0)
    assert [(event.key, event.index) for event in events if isinstance(event, Emitted)] == [(key("a", 1), 0)]


def test_a_stop_cuts_the_answer_and_drops_what_is_in_flight() -> None:
    scheduler = node(depth=2)
    scheduler.submit([job("a")], 0.0)
    plans = [planned(scheduler), planned(scheduler)]
    scheduler.complete(answer(plans[0]), 0.0)
    (end,) = scheduler.stop(key("a"), 0, DoneReason.STOP, 0.0, "stop")
    assert isinstance(end, Finished)
    assert (end.reason, end.detail, end.tokens) == (DoneReason.STOP, "stop", 0)
    assert scheduler.complete(answer(plans[1]), 0.0) == []
    assert scheduler.stop(key("a"), 0, DoneReason.STOP, 0.0) == []
    assert scheduler.telemetry(0.0).done_total == 1


def test_parts_are_settled_as_they_come() -> None:
    scheduler = node()
    scheduler.submit([job("a")], 0.0)
    tick(scheduler)
    scheduler.submit([job("b")], 0.0)
    plan = planned(scheduler)
    assert emitted(scheduler.complete(part_of(plan, 0, last=False), 0.0)) == ["a"]
    assert scheduler.plan(0.0) is None
    assert emitted(scheduler.complete(part_of(plan, 1, last=True), 0.0)) == ["b"]
    assert scheduler.plan(0.0) is not None


def test_a_tick_that_only_releases_is_not_counted() -> None:
    scheduler = node()
    scheduler.submit([job("a")], 0.0)
    tick(scheduler)
    scheduler.cancel(key("a"), 0.0)
    plan = planned(scheduler)
    assert (plan.release, plan.runs) == ((0,), False)
    scheduler.complete(answer(plan), 0.0)
    assert scheduler.telemetry(0.0).ticks_total == 1
    assert scheduler.plan(0.0) is None
    assert scheduler.idle


# ---- answers that fit no question


def test_answers_to_anything_but_the_oldest_tick_are_dropped_and_counted() -> None:
    scheduler = node(depth=2)
    scheduler.submit([job("a")], 0.0)
    first, second = planned(scheduler), planned(scheduler)
    assert scheduler.complete(answer(second), 0.0) == []
    assert emitted(scheduler.complete(answer(first), 0.0)) == ["a"]
    assert scheduler.complete(answer(first), 0.0) == []
    assert scheduler.stale_results == 2
    assert emitted(scheduler.complete(answer(second), 0.0)) == ["a"]


def test_a_row_that_was_not_asked_for_is_dropped_and_counted() -> None:
    scheduler = node()
    scheduler.submit([job("a")], 0.0)
    plan = planned(scheduler)
    result = answer(plan)
    strange = [*result.rows, ResultRow(3, 77, 5), result.rows[0]]
    events = scheduler.complete(msgspec.structs.replace(result, rows=strange), 0.0)
    assert emitted(events) == ["a"]
    assert scheduler.stale_results == 2


@pytest.mark.parametrize("new", [1, 8])
def test_a_session_whose_row_was_not_answered_is_rebuilt_and_ends_whole(new: int) -> None:
    scheduler = node(depth=2)
    scheduler.submit([job("a", new=new), job("b")], 0.0)
    plan = planned(scheduler)
    result = answer(plan)
    events = scheduler.complete(msgspec.structs.replace(result, rows=result.rows[1:]), 0.0)
    assert emitted(events) == ["b"]
    assert _rebuilt(events) == ["a"]
    finish(scheduler)
    assert scheduler.telemetry(0.0).done_total == 2


def test_a_row_skipped_without_a_reason_counts_as_not_answered() -> None:
    scheduler = node()
    scheduler.submit([job("a", new=1)], 0.0)
    events = scheduler.complete(answer(planned(scheduler), skip={"a"}), 0.0)
    assert _rebuilt(events) == ["a"]
    finish(scheduler)
    assert scheduler.telemetry(0.0).done_total == 1


# ---- failed ticks


def test_a_failed_decode_replays_its_own_sessions_and_leaves_prompts_of_the_tick_alone() -> None:
    scheduler = node(max_prefill_tokens_per_tick=4)
    scheduler.submit([job("a"), job("long", prompt=12)], 0.0)
    tick(scheduler)
    tick(scheduler)
    plan = planned(scheduler)
    assert (decoding(plan), prefilling(plan)) == (["a"], {"long": 4})
    events = scheduler.complete(failure(plan, part=0), 0.0)
    assert _rebuilt(events) == ["a"]
    retry = planned(scheduler)
    assert retry.resync
    assert retry.release == (0,)
    assert [(row.key.session_id, row.start, row.n) for row in retry.prefill] == [("long", 4, 4)], "it goes on"
    scheduler.complete(answer(retry), 0.0)
    assert not planned(scheduler).resync


def test_a_failed_prefill_leaves_the_decoded_tokens_of_the_tick_standing() -> None:
    scheduler = node()
    scheduler.submit([job("a")], 0.0)
    tick(scheduler)
    scheduler.submit([job("b")], 0.0)
    plan = planned(scheduler)
    assert emitted(scheduler.complete(part_of(plan, 0, last=False), 0.0)) == ["a"]
    assert _rebuilt(scheduler.complete(failure(plan, part=1), 0.0)) == ["b"]
    retry = planned(scheduler)
    assert [(row.key.session_id, row.pos) for row in retry.decode] == [("a", 5)]


def test_the_tick_behind_a_failed_one_is_void_and_planned_again() -> None:
    scheduler = node(depth=2)
    scheduler.submit([job("a"), job("b")], 0.0)
    tick(scheduler)
    first, second = planned(scheduler), planned(scheduler)
    scheduler.complete(failure(first), 0.0)
    third = planned(scheduler)
    assert third.resync
    assert scheduler.complete(failure(second, not_run=True, code=0), 0.0) == [], "no second rebuild for the void one"
    assert prefilling(third) == {"a": 5, "b": 5}
    events = scheduler.complete(answer(third), 0.0)
    assert [(event.key.session_id, event.index) for event in events if isinstance(event, Emitted)] == [
        ("a", 1),
        ("b", 1),
    ]


def test_releases_of_a_refused_tick_are_sent_again() -> None:
    scheduler = node()
    scheduler.submit([job("a"), job("b"), job("c")], 0.0)
    tick(scheduler)
    scheduler.cancel(key("a"), 0.0)
    plan = planned(scheduler)
    assert plan.release == (0,)
    scheduler.complete(failure(plan, not_run=True), 0.0)
    assert planned(scheduler).release == (0, 1, 2), "a's, and those of the two that start anew"


def test_a_session_that_gave_its_slot_away_comes_back_before_the_queue() -> None:
    scheduler = node(depth=2, max_active=1)
    scheduler.submit([job("a", new=1), job("b"), job("c")], 0.0)
    first, second = planned(scheduler), planned(scheduler)
    assert (prefilling(first), prefilling(second)) == ({"a": 4}, {"b": 4})
    assert _rebuilt(scheduler.complete(failure(first, part=1), 0.0)) == ["a"]
    assert scheduler.complete(failure(second, not_run=True, code=0), 0.0) == []
    events = finish(scheduler)
    assert list(_ends(events)) == ["b", "a", "c"]


# ---- the worker


def test_a_lost_worker_takes_both_ticks_with_it_and_nobody_loses_a_token() -> None:
    scheduler = node(depth=2)
    scheduler.submit([job("a"), job("b", new=2), job("c")], 0.0)
    tick(scheduler)
    planned(scheduler)
    planned(scheduler)
    assert sorted(_rebuilt(scheduler.worker_lost(1.0))) == ["a", "b", "c"]
    assert scheduler.plan(1.0) is None
    assert scheduler.telemetry(1.0).kv_bytes == 0
    scheduler.worker_ready(facts(), 2.0)
    plan = planned(scheduler)
    assert not plan.resync
    assert plan.release == ()
    assert {row.key.session_id: (row.n, row.n_emitted) for row in plan.prefill} == dict.fromkeys("abc", (5, 1))
    scheduler.complete(answer(plan), 2.0)
    finish(scheduler)
    assert scheduler.telemetry(0.0).done_total == 3


def test_emitted_tokens_come_back_as_forced_single_rows_where_the_engine_wants_that() -> None:
    engine = facts(replay_decode=True, min_prefill_rows=2)
    scheduler = node(engine=engine)
    scheduler.submit([job("a")], 0.0)
    for _ in range(3):
        tick(scheduler)
    scheduler.worker_lost(0.0)
    scheduler.worker_ready(engine, 0.0)
    plan = planned(scheduler)
    assert [(row.n, row.sample, row.n_emitted) for row in plan.prefill] == [(4, False, 0)]
    rows = []
    for _ in range(4):
        scheduler.complete(answer(plan), 0.0)
        plan = planned(scheduler)
        rows += [(row.pos, row.forced, row.sample) for row in plan.decode]
    assert rows == [(4, True, False), (5, True, False), (6, True, True), (7, False, True)]


def test_a_result_of_a_lost_worker_changes_nothing() -> None:
    scheduler = node()
    scheduler.submit([job("a")], 0.0)
    old = planned(scheduler)
    scheduler.worker_lost(0.0)
    scheduler.worker_ready(facts(), 0.0)
    plan = planned(scheduler)
    assert scheduler.complete(answer(old), 0.0) == []
    assert scheduler.stale_results == 1
    assert emitted(scheduler.complete(answer(plan), 0.0)) == ["a"]


def _strikes(scheduler: Scheduler) -> dict[str, int]:
    return {session.key.session_id: session.strikes for session in scheduler.sessions()}


def test_a_tick_that_the_engine_would_have_refused_counts_against_nobody() -> None:
    scheduler = node(depth=2)
    scheduler.submit([job("a")], 0.0)
    tick(scheduler)
    first = planned(scheduler)
    scheduler.submit([job("b")], 0.0)
    assert prefilling(planned(scheduler)) == {"b": 4}
    scheduler.complete(failure(first), 0.0)
    scheduler.worker_lost(0.0)
    assert _strikes(scheduler)["b"] == 0


def test_a_row_behind_a_miss_counts_against_nobody() -> None:
    scheduler = node(depth=2, max_prefill_tokens_per_tick=4)
    scheduler.submit([job("a", prompt=8)], 0.0)
    first, second = planned(scheduler), planned(scheduler)
    assert prefilling(second) == {"a": 4}
    scheduler.complete(answer(first, miss={"a"}), 0.0)
    scheduler.worker_lost(0.0)
    assert _strikes(scheduler) == {"a": 0}


def _one_suspect() -> Scheduler:
    """Two lost workers: "speaker" emitted a token before each, "silent" is still at its long prompt."""
    scheduler = node(max_active=2, max_prefill_tokens_per_tick=8)
    scheduler.submit([job("speaker"), job("silent", prompt=1000)], 0.0)
    for _ in range(2):
        tick(scheduler)
        planned(scheduler)
        scheduler.worker_lost(0.0)
        scheduler.worker_ready(facts(), 0.0)
    assert _strikes(scheduler) == {"speaker": 0, "silent": 2}
    return scheduler


def test_everyone_waits_while_a_suspect_is_on_trial() -> None:
    scheduler = _one_suspect()
    for _ in range(3):
        plan = planned(scheduler)
        assert (decoding(plan), list(prefilling(plan))) == ([], ["silent"])
        scheduler.complete(answer(plan), 0.0)
    assert _ends(scheduler.cancel(key("silent"), 0.0)) == {"silent": (DoneReason.CANCELLED, "")}
    assert list(prefilling(planned(scheduler))) == ["speaker"]


def test_a_session_on_trial_gets_a_slot_before_those_that_wait_for_its_verdict() -> None:
    scheduler = _one_suspect()
    scheduler.worker_lost(0.0)
    scheduler.worker_ready(facts(), 0.0, budget(max_active=1))
    assert list(prefilling(planned(scheduler))) == ["silent"]


def test_a_trial_begins_when_no_row_of_a_cleared_session_is_in_flight() -> None:
    scheduler = node(depth=2)
    scheduler.submit([job("a"), job("b")], 0.0)
    for _ in range(2):
        planned(scheduler)
        scheduler.worker_lost(0.0)
        scheduler.worker_ready(facts(), 0.0)
    first, second = planned(scheduler), planned(scheduler)
    assert (prefilling(first), decoding(second)) == ({"a": 4}, ["a"])
    scheduler.complete(answer(first), 0.0)
    assert scheduler.plan(0.0) is None, "a is cleared, b is tried alone"
    scheduler.complete(answer(second), 0.0)
    plan = planned(scheduler)
    assert (decoding(plan), prefilling(plan)) == ([], {"b": 4})


def test_the_drift_of_a_lost_worker_is_forgotten() -> None:
    scheduler = node()
    scheduler.submit([job("a", new=1)], 0.0)
    scheduler.complete(msgspec.structs.replace(answer(planned(scheduler)), kv_tokens=99), 0.0)
    assert scheduler.kv_drift_rows == 95
    scheduler.worker_lost(0.0)
    assert scheduler.kv_drift_rows == 0


def test_another_recipe_ends_who_has_tokens_of_the_old_one_and_nobody_else() -> None:
    scheduler = node(max_active=2)
    scheduler.submit([job("spoken"), job("silent", prompt=2000), job("waiting")], 0.0)
    tick(scheduler)
    scheduler.worker_lost(0.0)
    events = scheduler.worker_ready(facts(recipe_fingerprint="two"), 0.0)
    assert _ends(events) == {"spoken": (DoneReason.FAILED, "recipe_changed")}
    finish(scheduler)
    assert scheduler.telemetry(0.0).done_total == 2


def test_who_can_no_longer_fit_is_told_so() -> None:
    scheduler = node(max_active=1)
    scheduler.submit([job("small"), job("big", prompt=50), job("long", prompt=80)], 0.0)
    scheduler.worker_lost(0.0)
    events = scheduler.worker_ready(facts(context_tokens=80), 0.0, budget(kv_tokens=40, max_active=1))
    assert _ends(events) == dict.fromkeys(("big", "long"), (DoneReason.FAILED, "does_not_fit"))
    events = scheduler.worker_ready(facts(), 0.0, budget(scratch_bytes=9, scratch_bytes_per_session=10))
    assert _ends(events) == {"small": (DoneReason.FAILED, "does_not_fit")}


@pytest.mark.parametrize(
    ("engine", "changed"),
    [
        (facts(), budget(max_active=2)),
        (facts(max_sequences=2), budget(max_active=5)),
        (facts(), budget(max_active=5, kv_tokens=24)),
        (facts(), budget(max_active=5, scratch_bytes=29, scratch_bytes_per_session=10)),
    ],
)
def test_a_smaller_node_seats_as_many_as_it_can_and_the_others_follow_in_their_order(
    engine: object, changed: object
) -> None:
    scheduler = node(max_active=5)
    for number in range(5):
        scheduler.submit([job(f"s{number}")], 0.0)
    tick(scheduler, 1.0)
    scheduler.worker_lost(2.0)
    scheduler.worker_ready(engine, 2.0, changed)  # type: ignore[arg-type]
    scheduler.check()
    plan = planned(scheduler)
    assert _slots(plan) == {"s0": 0, "s1": 1}
    scheduler.complete(answer(plan), 0.0)
    assert list(_ends(finish(scheduler))) == ["s0", "s1", "s2", "s3", "s4"]


def test_seats_are_taken_again_in_the_order_of_their_start_not_of_their_slots() -> None:
    scheduler = node(max_active=2)
    scheduler.submit([job("first", new=1), job("second"), job("third")], 0.0)
    tick(scheduler, 1.0)
    assert _slots(planned(scheduler, 2.0)) == {"third": 0, "second": 1}
    scheduler.worker_lost(3.0)
    scheduler.worker_ready(facts(), 3.0, budget(max_active=1))
    assert _slots(planned(scheduler, 3.0)) == {"second": 0}


def test_a_larger_node_uses_its_new_slots() -> None:
    scheduler = node(max_active=1)
    scheduler.submit([job(name) for name in "abc"], 0.0)
    scheduler.worker_lost(0.0)
    scheduler.worker_ready(facts(), 0.0, budget(max_active=3))
    assert set(_slots(planned(scheduler))) == {"a", "b", "c"}


# ---- sessions of an earlier broker


def _resumed(engine: EngineFacts, emitted: int, new: int = 8) -> Scheduler:
    """A session that comes back before the worker does, and before anybody knows how it wants its tokens."""
    scheduler = Scheduler(budget(), facts(recipe_fingerprint=""), depth=1)
    scheduler.submit([job("a", new=new, emitted=emitted, resumed=True)], 0.0)
    scheduler.worker_ready(engine, 0.0)
    return scheduler


def test_a_resumed_session_is_rebuilt_as_the_engine_wants_it_and_goes_on_counting() -> None:
    scheduler = _resumed(facts(), emitted=3)
    plan = planned(scheduler)
    assert [(row.n, row.n_emitted, row.sample) for row in plan.prefill] == [(7, 3, True)]
    assert [event.index for event in scheduler.complete(answer(plan), 0.0) if isinstance(event, Emitted)] == [3]

    scheduler = _resumed(facts(replay_decode=True), emitted=3)
    plan = planned(scheduler)
    assert [(row.n, row.n_emitted, row.sample) for row in plan.prefill] == [(4, 0, False)]
    scheduler.complete(answer(plan), 0.0)
    assert [(row.pos, row.forced) for row in planned(scheduler).decode] == [(4, True)]


def test_a_resumed_session_generates_what_is_left_of_its_answer() -> None:
    events = finish(_resumed(facts(), emitted=3))
    assert [event.index for event in events if isinstance(event, Emitted)] == [3, 4, 5, 6, 7]
    assert _ends(events) == {"a": (DoneReason.LENGTH, "")}


def test_a_resumed_session_that_lacked_only_its_end_gets_it() -> None:
    scheduler = _resumed(facts(), emitted=8)
    (end,) = scheduler.take_promoted()
    assert isinstance(end, Finished)
    assert (end.reason, end.tokens) == (DoneReason.LENGTH, 8)
    assert scheduler.telemetry(0.0).balanced
    finish(scheduler)
    assert scheduler.idle


def test_what_was_accepted_before_passes_a_full_queue_but_not_without_bound() -> None:
    scheduler = node(max_active=2, queue_depth=1)
    for number in range(2 + 1 + 3):
        decision = scheduler.submit([job(f"s{number}", emitted=1, resumed=True)], 0.0)[0]
        assert decision.accepted == (number < 2 + 3)
    assert not scheduler.submit([job("new")], 0.0)[0].accepted
    finish(scheduler)
    assert scheduler.telemetry(0.0).done_total == 5


# ---- misses


def test_a_miss_ends_the_session_or_rebuilds_it() -> None:
    for recover in (False, True):
        scheduler = node(recover_misses=recover)
        scheduler.submit([job("a"), job("b")], 0.0)
        tick(scheduler)
        events = scheduler.complete(answer(planned(scheduler), miss={"a"}), 0.0)
        assert emitted(events) == ["b"]
        assert _rebuilt(events) == (["a"] if recover else [])
        assert _ends(events) == ({} if recover else {"a": (DoneReason.CACHE_MISS, "the KV was evicted")})
        assert scheduler.cache_misses == 1
        finish(scheduler)
        assert scheduler.telemetry(0.0).done_total == 1 + recover


def test_misses_without_a_token_in_between_come_to_an_end() -> None:
    scheduler = node()
    scheduler.submit([job("a")], 0.0)
    rebuilt = 0
    for _ in range(10):
        events = scheduler.complete(answer(planned(scheduler), miss={"a"}), 0.0)
        rebuilt += len(_rebuilt(events))
        if _ends(events):
            break
    assert rebuilt == 3
    assert _ends(events) == {"a": (DoneReason.CACHE_MISS, "the KV was evicted")}


def test_misses_with_tokens_in_between_may_go_on() -> None:
    scheduler = node()
    scheduler.submit([job("a", new=20)], 0.0)
    for _ in range(9):
        tick(scheduler)
        assert _rebuilt(scheduler.complete(answer(planned(scheduler), miss={"a"}), 0.0)) == ["a"]
    finish(scheduler)
    assert scheduler.telemetry(0.0).done_total == 1


# ---- events and facts


def test_promotions_are_told_once_with_the_time_in_the_queue() -> None:
    scheduler = node(max_active=1)
    scheduler.submit([job("a", new=1), job("b", new=1)], 1.0)
    assert scheduler.take_promoted() == [Promoted(key("a"), 0.0)]
    tick(scheduler, 2.0)
    planned(scheduler, 3.5)
    assert scheduler.take_promoted() == [Promoted(key("b"), 2.5)]
    assert scheduler.take_promoted() == []


def test_nothing_is_told_of_a_session_after_its_end() -> None:
    scheduler = node()
    scheduler.submit([job("a"), job("b")], 0.0)
    scheduler.cancel(key("a"), 0.0)
    assert scheduler.take_promoted() == [Promoted(key("b"), 0.0)]


def test_the_peak_of_kv_is_read_after_finished_sessions_left() -> None:
    scheduler = node(max_active=2)
    scheduler.submit([job("a", new=2), job("b", new=3)], 0.0)
    tick(scheduler)
    assert scheduler.kv_rows_peak == 8
    tick(scheduler)
    assert scheduler.kv_rows_peak == 8, "b's five rows alone: a's last row left with it"


def test_telemetry_shows_reservations_in_use() -> None:
    scheduler = node(kv_tokens=100, scratch_bytes_per_session=50)
    scheduler.submit([job("a"), job("b")], 0.0)
    tick(scheduler)
    seen = scheduler.telemetry(0.0)
    assert (seen.kv_bytes, seen.kv_pressure) == (8 * KV_BYTES, 0.08)
    assert (seen.scratch_bytes, seen.scratch_pressure) == (100, 0.1)
    assert (seen.weight_bytes, seen.prefill_tokens_total) == (7, 8)


def test_the_snapshot_has_every_signal_by_its_documented_name() -> None:
    names = """active_sessions queue_depth batch_occupancy_last batch_occupancy_avg batch_occupancy_max kv_bytes
    kv_cached_bytes kv_budget_bytes kv_pressure scratch_bytes scratch_budget_bytes scratch_pressure weight_bytes
    weight_budget_bytes ticks_total prefill_tokens_total decode_tokens_total prefill_tokens_per_s decode_tokens_per_s
    submitted_total done_total failed_total cancelled_total rejected_total rejected_by_reason
    parked_sessions parked_bytes park_budget_bytes parks_total park_drops_total prefix_lookups_total
    prefix_hits_total prefix_prompt_tokens_total prefix_hit_tokens_total prefix_hit_rate"""
    assert sorted(node().telemetry(0.0).to_dict()) == sorted(names.split())


def test_cancelling_the_unknown_or_ended_is_no_event() -> None:
    scheduler = node()
    assert scheduler.cancel(key("nobody"), 0.0) == []
    scheduler.submit([job("a", new=1)], 0.0)
    tick(scheduler)
    assert scheduler.cancel(key("a"), 0.0) == []
    assert scheduler.telemetry(0.0).cancelled_total == 0


def _books(scheduler: Scheduler) -> tuple[int, int, int, int, int, int, int]:
    seen = scheduler.telemetry(0.0)
    assert seen.balanced
    return (
        seen.submitted_total,
        seen.queue_depth,
        seen.active_sessions,
        seen.done_total,
        seen.failed_total,
        seen.cancelled_total,
        seen.rejected_total,
    )


def test_the_books_balance_at_every_turn() -> None:
    scheduler = node(max_active=1, queue_depth=3, depth=2)
    scheduler.submit([job("a", new=2), job("b", deadline=5.0), job("c"), job("d")], 0.0)
    assert _books(scheduler) == (4, 3, 1, 0, 0, 0, 0)
    scheduler.submit([job("e")], 0.0)
    assert _books(scheduler) == (5, 3, 1, 0, 0, 0, 1)
    first, second = planned(scheduler), planned(scheduler)
    scheduler.complete(answer(first), 0.0)
    planned(scheduler)
    assert _books(scheduler) == (5, 2, 2, 0, 0, 0, 1), "a waits for its last token while b has its slot"
    scheduler.complete(answer(second), 0.0)
    assert _books(scheduler) == (5, 2, 1, 1, 0, 0, 1)
    scheduler.expire(5.0)
    assert _books(scheduler) == (5, 2, 0, 1, 1, 0, 1)
    scheduler.cancel(key("d"), 0.0)
    assert _books(scheduler) == (5, 1, 0, 1, 1, 1, 1)
