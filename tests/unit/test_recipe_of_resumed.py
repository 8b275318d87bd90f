"""Tokens of two recipes never come to stand in one answer."""

from __future__ import annotations

from typing import Any

import pytest
from hand_worker import answer, budget, facts, finish, job, planned

from treadle import Recovering
from treadle._resume import resumed_request
from treadle._stream import Stream
from treadle_broker import Emitted, Finished, Scheduler
from treadle_shared import AdmissionDecision, AdmissionReason, DoneReason, calls
from treadle_shared.tokens import pack_tokens


def _scheduler(recipe: str = "", *, ready: bool = False) -> Scheduler:
    scheduler = Scheduler(budget(), facts(recipe_fingerprint=recipe), depth=1)
    if ready:
        scheduler.worker_ready(facts(recipe_fingerprint=recipe), 0.0)
    return scheduler


def _resumed(recipe: str, **options: Any) -> Any:
    return job("a", emitted=3, resumed=True, recipe=recipe, **options)


def _ends(events: list[object]) -> list[tuple[DoneReason, str, int]]:
    return [(event.reason, event.detail, event.tokens) for event in events if isinstance(event, Finished)]


def test_a_node_of_another_recipe_accepts_a_resumed_session_and_ends_it_at_once() -> None:
    scheduler = _scheduler("two", ready=True)
    (decision,) = scheduler.submit([_resumed("one")], 0.0)
    assert decision.accepted
    assert _ends(scheduler.take_promoted()) == [(DoneReason.FAILED, "recipe_changed", 3)]
    assert scheduler.idle
    assert scheduler.telemetry(0.0).balanced
    scheduler.check()


@pytest.mark.parametrize("known", ["", "one", "two"])
def test_a_resumed_session_that_comes_before_the_worker_ends_once_the_worker_tells_another_recipe(known: str) -> None:
    scheduler = _scheduler(known)
    scheduler.submit([_resumed("one")], 0.0)
    assert _ends(scheduler.take_promoted()) == []
    assert _ends(scheduler.worker_ready(facts(recipe_fingerprint="two"), 0.0)) == [
        (DoneReason.FAILED, "recipe_changed", 3)
    ]
    scheduler.check()


@pytest.mark.parametrize(("known", "recipe"), [("", "one"), ("one", "one"), ("two", "one"), ("", ""), ("one", "")])
def test_a_resumed_session_goes_on_under_its_own_recipe_or_where_none_is_named_and_none_was_known_before(
    known: str, recipe: str
) -> None:
    scheduler = _scheduler(known)
    scheduler.submit([_resumed(recipe)], 0.0)
    assert _ends(scheduler.worker_ready(facts(recipe_fingerprint="one"), 0.0)) == []
    assert [event.index for event in finish(scheduler) if isinstance(event, Emitted)] == [3, 4, 5, 6, 7]


def test_a_session_without_tokens_goes_on_under_any_recipe_and_is_bound_by_its_first_token() -> None:
    scheduler = _scheduler("one", ready=True)
    scheduler.submit([job("a")], 0.0)
    scheduler.worker_lost(0.0)
    assert _ends(scheduler.worker_ready(facts(recipe_fingerprint="two"), 0.0)) == []
    scheduler.complete(answer(planned(scheduler)), 0.0)
    scheduler.worker_lost(0.0)
    assert _ends(scheduler.worker_ready(facts(recipe_fingerprint="two"), 0.0)) == []
    scheduler.worker_lost(0.0)
    assert _ends(scheduler.worker_ready(facts(recipe_fingerprint="one"), 0.0)) == [
        (DoneReason.FAILED, "recipe_changed", 1)
    ]


def _stream(recipe: str) -> Stream:
    admission = AdmissionDecision(reason=AdmissionReason.QUEUED, session_id="s")
    stream = Stream(calls.Request(prompt="x"))
    stream.decide(calls.Decision(admission=admission, seed=1, key=bytes(16), max_tokens=8, recipe=recipe))
    return stream


def _delta(index: int, recipe: str = "") -> calls.Delta:
    return calls.Delta(session_id="s", epoch=0, index=index, tokens=pack_tokens([5]), text="", recipe=recipe)


def test_a_client_sends_back_the_recipe_of_its_tokens_not_that_of_the_acceptance() -> None:
    stream = _stream("")
    assert resumed_request(stream).recipe == ""
    stream.delta(_delta(0, "one"))
    stream.delta(_delta(1))
    assert resumed_request(stream).recipe == "one"
    stream.lost()
    admission = AdmissionDecision(reason=AdmissionReason.QUEUED, session_id="s")
    stream.decide(calls.Decision(admission=admission, seed=1, key=bytes(16), max_tokens=8, recipe="two"))
    assert resumed_request(stream).recipe == "one"
    assert isinstance(stream.events[-1], Recovering)


def test_a_client_that_holds_no_token_binds_nobody() -> None:
    assert resumed_request(_stream("one")).recipe == ""
