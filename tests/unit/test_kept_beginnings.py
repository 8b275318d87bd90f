"""What ended sessions leave, for how long, and who starts from it: prompts, answers, the budget."""

from __future__ import annotations

from array import array

from hand_worker import KV_BYTES, answer, facts, finish, job, key, planned, prefilling, tick
from shared_prompts import HASHER, asking, chain_of, copies, kept, run, sharing

from treadle_broker import Emitted, Finished, Job, Scheduler

# ---- after a session ended


def test_what_a_session_leaves_is_where_the_next_one_starts() -> None:
    scheduler = sharing()
    scheduler.submit([asking("a", 12, 2, new=1)], 0.0)
    tick(scheduler)
    leaving = planned(scheduler)
    assert kept(leaving) == [(0, 4, 12)]
    assert leaving.release == (0,)
    scheduler.complete(answer(leaving), 0.0)
    seen = scheduler.telemetry(0.0)
    assert (seen.kv_bytes, seen.kv_cached_bytes) == (0, 12 * KV_BYTES)
    scheduler.submit([asking("b", 12, 2)], 0.0)
    plan = planned(scheduler)
    assert copies(plan) == [(4, 0, 12)]
    assert prefilling(plan) == {"b": 2}
    assert plan.prefill[0].start == 12


def test_a_new_session_gets_the_slot_whose_rows_are_kept_in_the_same_tick() -> None:
    scheduler = sharing(max_active=1)
    scheduler.submit([asking("a", 12, 2, new=1), asking("b", 12, 2)], 0.0)
    tick(scheduler)
    plan = planned(scheduler)
    assert (kept(plan), plan.release, copies(plan)) == ([(0, 1, 12)], (0,), [(1, 0, 12)])


def test_the_longest_beginning_is_taken() -> None:
    scheduler = sharing()
    run(scheduler, asking("a", 8, 0))
    run(scheduler, asking("b", 24, 0))
    scheduler.submit([asking("c", 20, 3)], 0.0)
    (copy,) = planned(scheduler).copy
    assert copy.rows == 20


def test_at_least_one_row_is_left_to_run_and_as_many_as_the_engine_wants() -> None:
    for least, rows in ((1, 8), (2, 8), (5, 4)):
        scheduler = sharing(engine=facts(can_copy=True, max_sequences=8, min_prefill_rows=least))
        run(scheduler, asking("a", 12, 0))
        scheduler.submit([asking("b", 12, 0)], 0.0)
        plan = planned(scheduler)
        assert copies(plan) == [(4, 0, rows)]
        assert prefilling(plan) == {"b": 12 - rows}


def test_what_adds_little_to_what_is_kept_is_not_kept_again() -> None:
    scheduler = sharing()
    run(scheduler, asking("a", 12, 2))
    run(scheduler, asking("b", 12, 7))
    assert scheduler.telemetry(0.0).kv_cached_bytes == 12 * KV_BYTES


def test_what_goes_on_where_a_kept_one_ends_takes_its_place() -> None:
    scheduler = sharing()
    run(scheduler, asking("a", 12, 0))
    run(scheduler, asking("b", 24, 0))
    assert scheduler.telemetry(0.0).kv_cached_bytes == 24 * KV_BYTES


def test_what_was_used_least_recently_goes_first() -> None:
    scheduler = sharing(cache_slots=2)
    run(scheduler, asking("a", 0, 12))
    run(scheduler, asking("b", 0, 12))
    run(scheduler, asking("a", 0, 12))  # used again
    run(scheduler, asking("c", 0, 12))
    scheduler.submit([asking("a", 0, 12), asking("b", 0, 12)], 0.0)
    assert [row.key for row in planned(scheduler).copy] == [key("a", 2)]


def test_with_no_cache_slots_or_an_engine_that_cannot_copy_nothing_is_shared() -> None:
    for scheduler in (sharing(cache_slots=0), sharing(engine=facts(max_sequences=8))):
        run(scheduler, asking("a", 12, 2))
        scheduler.submit([asking("b", 12, 2), asking("c", 12, 2)], 0.0)
        assert prefilling(planned(scheduler)) == {"b": 14, "c": 14}
        finish(scheduler)
        assert scheduler.telemetry(0.0).prefix_hit_tokens_total == 0


def test_of_two_alike_that_leave_together_the_longer_is_kept() -> None:
    scheduler = sharing(max_prefill_tokens_per_tick=100)
    scheduler.submit([asking("a", 12, 0, new=2), asking("b", 24, 0, new=1), asking("c", 0, 12)], 0.0)
    for _ in range(2):
        tick(scheduler)
    assert kept(planned(scheduler)) == [(1, 4, 24)]


def test_of_many_that_leave_together_the_longest_eight_are_kept_while_somebody_waits_for_a_token() -> None:
    scheduler = sharing(cache_slots=12, max_active=12, engine=facts(can_copy=True, max_sequences=24))
    scheduler.submit([asking("z", 0, 3, new=9)], 0.0)
    tick(scheduler)
    scheduler.submit([asking(name, 0, 8 + 4 * place, new=1) for place, name in enumerate("abcdefghij")], 0.0)
    tick(scheduler)
    assert [rows for _, _, rows in kept(planned(scheduler))] == [44, 40, 36, 32, 28, 24, 20, 16]


def test_all_that_leave_together_are_kept_where_nobody_waits_for_a_token() -> None:
    scheduler = sharing(cache_slots=4)
    scheduler.submit([asking(name, 0, 8 + 4 * place, new=1) for place, name in enumerate("abcd")], 0.0)
    tick(scheduler)
    assert kept(planned(scheduler)) == [(3, 4, 20), (2, 5, 16), (1, 6, 12), (0, 7, 8)]


# ---- answers


def answered(scheduler: Scheduler, first: Job, *, end: bool = True) -> array[int]:
    """A session of four prompt tokens that says 7 until it ends, or until twelve tokens of it are confirmed; all it
    holds.
    """
    sequence = array("i", range(4))
    chain = HASHER.chain("ann", "")
    assert chain.grow(sequence) == first.prefix
    scheduler.submit([first], 0.0)
    while (end or len(sequence) < 16) and (plan := scheduler.plan(0.0)) is not None:
        for event in scheduler.complete(answer(plan), 0.0):
            if isinstance(event, Emitted):
                sequence.append(event.token)
                scheduler.extend(event.key, chain.grow(sequence))
    scheduler.check()
    return sequence


def next_turn(name: str, said: array[int]) -> Job:
    """A prompt of all that was said, and three tokens more."""
    tokens = said + array("i", [50, 51, 52])
    return job(name, len(tokens), 3, prefix=chain_of(HASHER, "ann", "", tokens))


def test_the_next_turn_of_a_conversation_starts_behind_the_last_answer() -> None:
    scheduler = sharing()
    said = answered(scheduler, asking("a", 4, 0, new=9))
    assert len(said) == 13
    scheduler.submit([next_turn("b", said)], 0.0)
    plan = planned(scheduler)
    assert copies(plan) == [(4, 0, 12)]
    assert prefilling(plan) == {"b": 4}


def test_the_last_token_of_an_answer_is_not_there() -> None:
    scheduler = sharing()
    said = answered(scheduler, asking("a", 4, 0, new=8))
    assert len(said) == 12
    scheduler.submit([next_turn("b", said)], 0.0)
    assert copies(planned(scheduler)) == [(4, 0, 8)]


def test_rows_of_emitted_tokens_do_not_count_where_they_differ_from_prefilled_ones() -> None:
    scheduler = sharing(engine=facts(can_copy=True, max_sequences=8, replay_decode=True))
    said = answered(scheduler, asking("a", 4, 0, new=9))
    scheduler.submit([next_turn("b", said)], 0.0)
    plan = planned(scheduler)
    assert (copies(plan), prefilling(plan)) == ([(4, 0, 4)], {"b": 12})


def test_an_answer_that_still_comes_can_be_started_from_as_far_as_it_is_confirmed() -> None:
    scheduler = sharing()
    said = answered(scheduler, asking("a", 4, 0, new=40), end=False)
    sent = planned(scheduler)  # the row of the sixteenth token is planned, and not confirmed
    scheduler.complete(answer(sent), 0.0)
    scheduler.submit([next_turn("b", said)], 0.0)
    assert copies(planned(scheduler)) == [(0, 1, 16)]
    other = sharing()
    said = answered(other, asking("a", 4, 0, new=40), end=False)
    other.submit([next_turn("b", said)], 0.0)
    plan = planned(other)
    assert [row.key for row in plan.decode] == [key("a")]
    assert copies(plan) == [(0, 1, 12)]


def test_what_a_session_finds_of_its_own_is_not_told_as_taken_from_another() -> None:
    turns = {"max_active": 2, "slots": 1, "kv_policy": "optimistic", "slice_tokens": 4, "park_bytes": 0}
    scheduler = sharing(cache_slots=3, **turns)  # type: ignore[arg-type]
    scheduler.submit([asking("a", 0, 12, new=12), asking("b", 0, 12, new=12)], 0.0)
    copied = 0
    ends: list[Finished] = []
    while (plan := scheduler.plan(0.0)) is not None:
        copied += len(plan.copy)
        ends += [event for event in scheduler.complete(answer(plan), 0.0) if isinstance(event, Finished)]
    assert copied >= 2  # each has come back from having been dropped
    assert [end.cached for end in ends] == [0, 0]


# ---- within the budget


def test_kept_rows_make_room_before_anybody_waits() -> None:
    scheduler = sharing(kv_tokens=40)
    run(scheduler, asking("a", 12, 0))
    run(scheduler, asking("b", 0, 12))
    decision = scheduler.submit([job("c", 28, 12)], 0.0)[0]
    assert decision.reason.value == "ADMITTED"
    plan = planned(scheduler)
    assert plan.release == (4, 5)
    assert scheduler.telemetry(0.0).kv_cached_bytes == 0


def test_nothing_is_kept_where_running_sessions_have_reserved_the_room() -> None:
    scheduler = sharing(kv_tokens=40)
    scheduler.submit([asking("a", 12, 0, new=1), job("b", 20, 12)], 0.0)
    tick(scheduler)
    leaving = planned(scheduler)
    assert leaving.release == (0,)
    assert kept(leaving) == []


def test_what_is_kept_of_two_that_leave_together_stays_within_the_room() -> None:
    scheduler = sharing(kv_tokens=52)
    scheduler.submit([asking("a", 0, 12, new=1), asking("b", 0, 12, new=1), job("c", 20, 6)], 0.0)
    tick(scheduler)
    assert kept(planned(scheduler)) == [(0, 4, 12), (1, 5, 12)]
    scheduler = sharing(kv_tokens=49)
    scheduler.submit([asking("a", 0, 12, new=1), asking("b", 0, 12, new=1), job("c", 20, 3)], 0.0)
    tick(scheduler)
    scheduler.submit([job("d", 1, 4)], 0.0)
    assert kept(planned(scheduler)) == [(0, 4, 12)]
    scheduler.check()


def test_what_a_seated_session_will_start_from_is_given_up_last() -> None:
    scheduler = sharing(kv_tokens=40)
    run(scheduler, asking("a", 12, 0))
    run(scheduler, asking("b", 0, 12))
    scheduler.submit([asking("c", 12, 4, new=4)], 0.0)
    plan = planned(scheduler)
    assert copies(plan) == [(4, 0, 12)]
    assert plan.release == (5,)
