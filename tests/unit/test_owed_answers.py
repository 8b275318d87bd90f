"""Answers that do not come: the scheduler sees that one was overtaken."""

from __future__ import annotations

from hand_worker import answer, job, node, planned, tick


def test_an_answer_to_the_second_tick_before_the_first_is_one_that_overtook() -> None:
    scheduler = node(depth=2)
    assert not scheduler.awaits_answer
    scheduler.submit([job("a")], 0.0)
    first, second = planned(scheduler), planned(scheduler)
    assert scheduler.awaits_answer
    assert scheduler.overtaken(answer(second))
    assert not scheduler.overtaken(answer(first))
    scheduler.complete(answer(first), 0.0)
    assert not scheduler.overtaken(answer(second))
    assert not scheduler.overtaken(answer(first)), "what is over overtakes nobody"


def test_a_slot_is_free_two_ticks_after_a_cancel_at_the_latest() -> None:
    for depth in (1, 2):
        scheduler = node(depth=depth, max_active=1)
        scheduler.submit([job("a", new=50), job("b")], 0.0)
        for _ in range(3):
            tick(scheduler)
        in_flight = [planned(scheduler) for _ in range(depth)]
        (a,) = [row.key for row in in_flight[0].decode]
        scheduler.cancel(a, 0.0)
        scheduler.submit([job("a")], 0.0)  # the id may be used again at once
        for plan in in_flight:
            scheduler.complete(answer(plan), 0.0)
        assert {row.key.session_id for row in planned(scheduler).prefill} == {"b"}
        assert len(in_flight) <= 2
