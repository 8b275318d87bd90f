"""What a session starts from: prompts that begin alike, while they run, after they ended, and when things fail."""

from __future__ import annotations

from array import array

import pytest
from hand_worker import KV_BYTES, answer, budget, facts, failure, finish, job, key, node, planned, prefilling, tick

from treadle_broker import Emitted, Finished, Job, Rebuilding, Scheduler
from treadle_broker.plan import PlannedCopy
from treadle_broker.prefix_hash import PrefixHasher
from treadle_shared.budget import NodeBudget
from treadle_shared.engine import EngineFacts
from treadle_shared.outcome import DoneReason

BLOCK = 4
HASHER = PrefixHasher("node", BLOCK)
ENGINE = facts(can_copy=True, max_sequences=8)


def sharing(depth: int = 1, cache_slots: int = 2, engine: EngineFacts = ENGINE, **changes: int) -> Scheduler:
    """Four places for sessions, and more for what they leave."""
    return node(depth, engine, cache_slots=cache_slots, prefix_block_tokens=BLOCK, **changes)


def chain_of(hasher: PrefixHasher, client: str, salt: str, tokens: array[int]) -> bytes:
    """The digests of a whole sequence."""
    return hasher.chain(client, salt).grow(tokens)


def asking(name: str, common: int, own: int, new: int = 3, salt: str = "") -> Job:
    """A prompt of so many tokens like everybody's, then so many of its own."""
    tokens = array("i", [*range(common), *(1000 * sum(name.encode()) + place for place in range(own))])
    return job(name, len(tokens), new, prefix=chain_of(HASHER, "ann", salt, tokens))


def copies(plan: object) -> list[tuple[int, int, int]]:
    """From slot, to slot, rows, of what new sessions start from."""
    return [(row.source, row.slot, row.rows) for row in plan.copy]  # type: ignore[attr-defined]


def kept(plan: object) -> list[tuple[int, int, int]]:
    """From slot, to slot, rows, of what is kept."""
    return [(row.source, row.slot, row.rows) for row in plan.keep]  # type: ignore[attr-defined]


def run(scheduler: Scheduler, *jobs: Job) -> None:
    """Jobs from their submission to their end, all that is due then done."""
    scheduler.submit(jobs, 0.0)
    finish(scheduler)


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


# ---- at the same moment


def test_a_common_beginning_is_computed_once_by_those_who_come_together() -> None:
    scheduler = sharing(max_active=4, max_prefill_tokens_per_tick=100)
    scheduler.submit([asking(name, 40, 3) for name in "abcd"], 0.0)
    first = planned(scheduler)
    assert prefilling(first) == {"a": 43}
    scheduler.complete(answer(first), 0.0)
    second = planned(scheduler)
    assert copies(second) == [(0, 1, 40), (0, 2, 40), (0, 3, 40)]
    assert prefilling(second) == {"b": 3, "c": 3, "d": 3}
    scheduler.complete(answer(second), 0.0)
    finish(scheduler)
    seen = scheduler.telemetry(0.0)
    assert (seen.prefill_tokens_total, seen.prefix_hit_tokens_total) == (40 + 4 * 3, 3 * 40)
    assert (seen.prefix_lookups_total, seen.prefix_hits_total) == (4, 3)
    assert seen.prefix_hit_rate == 120 / 172


def test_the_waiting_start_with_the_tick_after_the_common_rows_were_sent() -> None:
    scheduler = sharing(depth=2, max_prefill_tokens_per_tick=16)
    scheduler.submit([asking("a", 24, 8), asking("b", 24, 2)], 0.0)
    first, second = planned(scheduler), planned(scheduler)
    assert prefilling(first) == prefilling(second) == {"a": 16}
    scheduler.complete(answer(first), 0.0)
    third = planned(scheduler)  # the second is not answered yet
    assert copies(third) == [(0, 1, 24)]
    assert prefilling(third) == {"b": 2}


def test_others_are_not_held_up_by_those_who_wait() -> None:
    scheduler = sharing(max_prefill_tokens_per_tick=30)
    scheduler.submit([asking("a", 24, 2), asking("b", 24, 2), asking("c", 0, 9)], 0.0)
    assert prefilling(planned(scheduler)) == {"a": 26, "c": 4}


def test_when_the_one_waited_for_is_cancelled_the_next_goes_on_from_what_it_left() -> None:
    scheduler = sharing(max_prefill_tokens_per_tick=10)
    scheduler.submit([asking("a", 24, 2), asking("b", 24, 2), asking("c", 24, 2)], 0.0)
    tick(scheduler)
    scheduler.cancel(key("a"), 0.0)
    plan = planned(scheduler)
    assert kept(plan) == [(0, 4, 8)]
    assert copies(plan) == [(4, 1, 8)]
    assert prefilling(plan) == {"b": 10}
    scheduler.complete(answer(plan), 0.0)
    finish(scheduler)
    assert scheduler.telemetry(0.0).done_total == 2


def test_a_suspect_on_trial_waits_for_nobody_who_may_not_run() -> None:
    scheduler = sharing(max_prefill_tokens_per_tick=10, max_active=2)
    scheduler.submit([asking("b", 24, 2), asking("a", 24, 30)], 0.0)
    for _ in range(2):  # b dies twice before it emits anything: from then on it runs alone
        scheduler.complete(failure(planned(scheduler), part=1), 0.0)
    plan = planned(scheduler)
    assert prefilling(plan) == {"b": 10}
    scheduler.complete(answer(plan), 0.0)
    finish(scheduler)
    assert scheduler.telemetry(0.0).done_total == 2


def test_a_suspect_that_shares_with_a_running_prompt_is_tried_all_the_same() -> None:
    scheduler = sharing(max_prefill_tokens_per_tick=10, max_active=3)
    scheduler.submit([asking("a", 24, 40)], 0.0)
    tick(scheduler)
    scheduler.submit([asking("b", 24, 2)], 0.0)
    suspects = scheduler._roster.suspects
    session = scheduler._roster.sessions[key("b")]
    for _ in range(2):
        suspects.lost([session])
    assert not suspects.may_run(scheduler._roster.sessions[key("a")])
    assert prefilling(planned(scheduler)) == {"b": 10 - 8 + 8}


# ---- tenants


def test_another_salt_or_another_client_shares_nothing() -> None:
    scheduler = sharing()
    run(scheduler, asking("a", 12, 2, salt="red"))
    scheduler.submit([asking("b", 12, 2, salt="blue"), asking("c", 12, 2, salt="red")], 0.0)
    assert [row.key for row in planned(scheduler).copy] == [key("c")]


@pytest.mark.parametrize(("sharing_rule", "same"), [("node", True), ("client", False)])
def test_clients_are_kept_apart_where_they_are_to_be(sharing_rule: str, same: bool) -> None:
    hasher = PrefixHasher(sharing_rule, BLOCK)  # type: ignore[arg-type]
    tokens = array("i", range(9))
    assert (chain_of(hasher, "ann", "", tokens) == chain_of(hasher, "bob", "", tokens)) is same
    assert chain_of(hasher, "ann", "x", tokens) != chain_of(hasher, "ann", "", tokens)
    assert chain_of(hasher, "ann", "", tokens) == chain_of(hasher, "ann", "", array("i", range(8)))
    assert chain_of(PrefixHasher("off", BLOCK), "ann", "", tokens) == b""


def test_a_digest_covers_everything_before_it_and_another_start_has_other_ones() -> None:
    one, other = (chain_of(HASHER, "ann", "", array("i", [first, *range(1, 8)])) for first in (0, 9))
    assert len(one) == len(other) == 2 * 16
    assert one[16:] != other[16:]
    assert chain_of(PrefixHasher("node", BLOCK), "ann", "", array("i", range(8))) != one


# ---- failures


def test_what_a_lost_tick_was_to_keep_is_not_there() -> None:
    scheduler = sharing()
    scheduler.submit([asking("a", 12, 2, new=1), job("z", 3, 9)], 0.0)
    tick(scheduler)
    plan = planned(scheduler)
    assert kept(plan) == [(0, 4, 12)]
    scheduler.complete(failure(plan), 0.0)
    assert scheduler.telemetry(0.0).kv_cached_bytes == 0
    assert 4 in planned(scheduler).release


def test_a_session_whose_source_was_lost_is_not_told_to_start_there_again() -> None:
    scheduler = sharing()
    run(scheduler, asking("a", 12, 2))
    scheduler.submit([asking("b", 12, 2)], 0.0)
    plan = planned(scheduler)
    assert plan.copy
    scheduler.complete(answer(plan, miss=["b"]), 0.0)
    again = planned(scheduler)
    assert (again.copy, prefilling(again)) == ((), {"b": 14})
    assert again.release == (0, 4)


def test_a_copy_from_a_running_session_that_missed_is_not_tried_again() -> None:
    scheduler = sharing()
    scheduler.submit([asking("a", 12, 2, new=20)], 0.0)
    tick(scheduler)
    scheduler.submit([asking("b", 12, 2)], 0.0)
    plan = planned(scheduler)
    assert copies(plan) == [(0, 1, 12)]
    scheduler.complete(answer(plan, miss=["b"]), 0.0)
    assert prefilling(planned(scheduler)) == {"b": 14}


def test_a_beginning_that_is_gone_ends_nobody_even_where_lost_kv_does() -> None:
    scheduler = node(engine=ENGINE, recover_misses=False, cache_slots=2, prefix_block_tokens=BLOCK)
    run(scheduler, asking("a", 12, 2))
    scheduler.submit([asking("b", 12, 3)], 0.0)
    plan = planned(scheduler)
    assert copies(plan)
    events = scheduler.complete(answer(plan, miss=["b"]), 0.0)
    assert [type(event) for event in events] == [Rebuilding]
    plan = planned(scheduler)
    assert (copies(plan), prefilling(plan)) == ([], {"b": 15})
    scheduler.complete(answer(plan), 0.0)
    assert [event.reason for event in finish(scheduler) if isinstance(event, Finished)] == [DoneReason.LENGTH]


def test_a_tick_copies_no_more_than_fits_a_frame() -> None:
    scheduler = sharing(engine=facts(can_copy=True), max_active=100, max_prefill_tokens_per_tick=1000)
    run(scheduler, asking("first", 12, 2))
    scheduler.submit([asking(f"{number}", 12, 3) for number in range(80)], 0.0)
    sizes = []
    while (plan := scheduler.plan(0.0)) is not None and plan.prefill:
        sizes.append(len(plan.copy))
        scheduler.complete(answer(plan), 0.0)
    assert sizes == [24, 24, 24, 8]


def test_the_rows_of_a_cancelled_session_that_turn_out_to_be_missing_are_not_kept() -> None:
    scheduler = sharing()
    scheduler.submit([asking("a", 12, 2)], 0.0)
    tick(scheduler)
    plan = planned(scheduler)
    scheduler.cancel(key("a"), 0.0)
    scheduler.complete(answer(plan, miss=["a"]), 0.0)
    assert kept(planned(scheduler)) == []


def test_a_new_worker_has_nothing_and_its_sessions_share_again() -> None:
    scheduler = sharing()
    run(scheduler, asking("z", 0, 20))
    scheduler.submit([asking("a", 12, 2, new=9), asking("b", 12, 2)], 0.0)
    tick(scheduler)
    tick(scheduler)
    scheduler.worker_lost(0.0)
    assert scheduler.telemetry(0.0).kv_cached_bytes == 0
    scheduler.worker_ready(ENGINE, 0.0)
    plan = planned(scheduler)
    assert prefilling(plan) == {"a": 16}  # two tokens that it had emitted come back with the prompt
    scheduler.complete(answer(plan), 0.0)
    assert copies(planned(scheduler)) == [(0, 1, 12)]


def test_sessions_keep_their_places_however_many_slots_the_cache_asks_for() -> None:
    changes: NodeBudget = budget(max_active=4, cache_slots=100, prefix_block_tokens=BLOCK)
    scheduler = Scheduler(changes, ENGINE)
    scheduler.worker_ready(ENGINE, 0.0)
    assert len(scheduler._roster._cache_places) == 4
    assert scheduler._roster.open_seats == 4


def test_a_copy_is_known_by_its_session() -> None:
    scheduler = sharing()
    run(scheduler, asking("a", 12, 2))
    scheduler.submit([asking("b", 12, 2, new=1)], 0.0)
    plan = planned(scheduler)
    assert plan.copy == (PlannedCopy(key("b"), 4, plan.copy[0].source_gen, 0, plan.prefill[0].gen, 12),)
    (_, finished) = scheduler.complete(answer(plan), 0.0)
    assert finished.cached == 12  # type: ignore[union-attr]
