"""What sessions that run start from: prompts that begin alike, tenants, and what failures leave of it."""

from __future__ import annotations

from array import array

import pytest
from hand_worker import answer, budget, facts, failure, finish, job, key, node, planned, prefilling, tick
from shared_prompts import BLOCK, ENGINE, HASHER, asking, chain_of, copies, kept, run, sharing

from treadle_broker import Finished, Rebuilding, Scheduler
from treadle_broker.plan import PlannedCopy
from treadle_broker.prefix_hash import PrefixHasher
from treadle_shared.budget import NodeBudget
from treadle_shared.outcome import DoneReason

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
