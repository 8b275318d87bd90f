"""The in-process scheduler on the real reference engine: the same tokens however, and from wherever, it is driven."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest

from treadle_broker import ContinuousBatchScheduler, SchedulerStalled, SessionOutput
from treadle_shared import DoneReason, GenerationRequest, NodeBudget, SamplingParams, load_config
from treadle_shared.bytevocab import EOS
from treadle_shared.engine import DecodeItem, PrefillItem, StepResult
from treadle_shared.errors import InvalidRequest
from treadle_worker.reference import KvBatchEngine, build_reference_engine

KV_BYTES = 1536  # the reference engine's KV of one token


class Clock:
    """Time that moves only when told to."""

    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


class Slow:
    """An engine whose every batch takes a second of the clock."""

    def __init__(self, engine: KvBatchEngine, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def prefill(self, items: Sequence[PrefillItem]) -> list[StepResult]:
        self._clock.now += 1.0
        return self._engine.prefill(items)

    def decode_batch(self, items: Sequence[DecodeItem]) -> list[StepResult]:
        self._clock.now += 1.0
        return self._engine.decode_batch(items)


def _engine(sessions: int = 8, tokens: int = 96, kv_tokens: int | None = None) -> KvBatchEngine:
    flags = {"engine": "reference", "max_sessions": sessions, "session_tokens": tokens, "cache_slots": 0}
    if kv_tokens is not None:
        flags["kv_bytes"] = kv_tokens * KV_BYTES
    return build_reference_engine(load_config(environ={}, flags=flags))


def _scheduler(engine: Any = None, *, kv_tokens: int = 10_000, **options: Any) -> ContinuousBatchScheduler:
    settings = {"weight_bytes": 1 << 30, "kv_bytes": kv_tokens * KV_BYTES, "scratch_bytes": 1 << 30}
    bounds = {name: options.pop(name) for name in list(options) if name in NodeBudget.__dataclass_fields__}
    return ContinuousBatchScheduler(engine or _engine(), NodeBudget(**{**settings, **bounds}), **options)


def _request(name: str, prompt: int = 5, new: int = 8, **params: Any) -> GenerationRequest:
    tokens = [(31 * place + sum(name.encode())) % 256 for place in range(prompt)]
    chosen = SamplingParams(**{"ignore_eos": True, "seed": 3, **params})
    return GenerationRequest(session_id=name, prompt_tokens=tokens, max_new_tokens=new, params=chosen)


@cache
def _lone_engine() -> KvBatchEngine:
    return _engine(sessions=1)


def _alone(request: GenerationRequest) -> list[int]:
    """The answer by the engine's contract alone, without a scheduler."""
    engine, prompt = _lone_engine(), request.prompt_tokens
    (step,) = engine.prefill([PrefillItem(0, 0, 0, prompt, sample=True, params=request.params)])
    tokens: list[int] = []
    while step.token is not None and not step.eog:
        tokens.append(step.token)
        if len(tokens) == request.max_new_tokens:
            break
        (step,) = engine.decode_batch([DecodeItem(0, 0, len(prompt) + len(tokens) - 1)])
    engine.release(0, 0)
    return tokens


def _answers(scheduler: ContinuousBatchScheduler, requests: Sequence[GenerationRequest]) -> dict[str, list[int]]:
    assert all(decision.accepted for decision in scheduler.submit_many(requests))
    outputs = scheduler.run_to_completion()
    scheduler.check()
    return {session_id: output.tokens for session_id, output in outputs.items()}


MIXED = [
    _request(f"s{number}", prompt=1 + 7 * number % 20, new=1 + 5 * number % 13, temperature=0.9 * (number % 2))
    for number in range(12)
]


# ---- the same tokens


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    "bounds",
    [
        {"max_active": 1},
        {"max_active": 8},
        {"max_active": 8, "max_batch_size": 3},
        {"max_active": 8, "max_prefill_tokens_per_tick": 1},
        {"max_active": 4, "kv_tokens": 40},
    ],
    ids=["alone", "together", "small batch", "small chunks", "little kv"],
)
def test_the_tokens_do_not_depend_on_how_sessions_are_batched(depth: int, bounds: dict[str, int]) -> None:
    found = _answers(_scheduler(depth=depth, **bounds), MIXED)
    assert found == {request.session_id: _alone(request) for request in MIXED}


def test_an_answer_ends_before_its_end_of_generation_token() -> None:
    bias = {EOS: 6.0}  # likely enough to come, not at once
    requests = [_request(f"s{n}", new=40, temperature=1.0, seed=n, ignore_eos=False, logit_bias=bias) for n in range(8)]
    scheduler = _scheduler(depth=2)
    found = _answers(scheduler, requests)
    assert found == {request.session_id: _alone(request) for request in requests}
    reasons = {output.reason for output in scheduler.outputs().values()}
    assert DoneReason.STOP in reasons
    assert all(EOS not in tokens for tokens in found.values())
    assert scheduler.telemetry().kv_bytes == 0


def test_seeds_that_nobody_chose_are_repeatable_by_the_schedulers_own() -> None:
    def answers(seed: int) -> dict[str, list[int]]:
        return _answers(_scheduler(seed=seed), [_request(name, temperature=1.0, seed=None) for name in "abc"])

    assert answers(1) == answers(1)
    assert answers(1) != answers(2)


def test_logprobs_come_one_a_token_where_they_were_asked_for() -> None:
    scheduler = _scheduler()
    scheduler.submit_many([_request("with", logprobs=2), _request("without")])
    outputs = scheduler.run_to_completion()
    assert len(outputs["with"].logprobs) == len(outputs["with"].tokens) == 8
    assert all(one.top[0][1] == one.chosen for one in outputs["with"].logprobs)
    assert outputs["without"].logprobs == []


# ---- evictions


def test_a_session_rebuilt_after_an_eviction_gives_the_tokens_of_an_undisturbed_run() -> None:
    requests = [_request(name, prompt=6, new=12) for name in "abc"]
    scheduler = _scheduler(_engine(kv_tokens=40), recover_misses=True, depth=2)
    assert _answers(scheduler, requests) == {request.session_id: _alone(request) for request in requests}
    assert scheduler.cache_misses > 0


def test_sessions_that_can_never_all_be_held_still_come_to_an_end() -> None:
    """The budget promises more KV than the engine has: even one session does not fit."""
    scheduler = _scheduler(_engine(kv_tokens=10), recover_misses=True)
    scheduler.submit_many([_request(name, prompt=20) for name in "abc"])
    outputs = scheduler.run_to_completion(max_ticks=200)
    assert {output.reason for output in outputs.values()} == {DoneReason.CACHE_MISS}
    scheduler.check()


def test_an_engine_of_fewer_sequences_than_slots_serves_in_turn() -> None:
    requests = [_request(name) for name in "abcde"]
    scheduler = _scheduler(_engine(sessions=2), max_active=8)
    assert _answers(scheduler, requests) == {request.session_id: _alone(request) for request in requests}
    assert scheduler.telemetry().batch_occupancy_max == 2


# ---- ends


def test_a_cancelled_session_keeps_what_it_had_and_frees_its_id() -> None:
    scheduler = _scheduler(depth=2)
    scheduler.submit(_request("a", new=20))
    for _ in range(4):
        scheduler.run_tick()
    assert scheduler.cancel("a")
    assert not scheduler.cancel("a")
    output = scheduler.output("a")
    assert (output.reason, len(output.tokens)) == (DoneReason.CANCELLED, 4)
    assert scheduler.submit(_request("a", new=2)).epoch == 1
    assert scheduler.run_to_completion()["a"].tokens == _alone(_request("a", new=2))
    assert (output.reason, len(output.tokens)) == (DoneReason.CANCELLED, 4), "the first answer stays as it was"


def test_deadlines_follow_the_clock() -> None:
    clock = Clock()
    scheduler = _scheduler(Slow(_engine(), clock), max_active=1, clock=clock)
    late = GenerationRequest(session_id="late", prompt_tokens=[1], max_new_tokens=90, deadline_s=5.0)
    bored = GenerationRequest(session_id="bored", prompt_tokens=[1], max_new_tokens=1, queue_timeout_s=3.0)
    patient = GenerationRequest(session_id="patient", prompt_tokens=[1], max_new_tokens=1)
    scheduler.submit_many([late, bored, patient])
    outputs = scheduler.run_to_completion()
    assert (outputs["late"].reason, outputs["late"].detail) == (DoneReason.DEADLINE, "deadline")
    assert len(outputs["late"].tokens) == 5
    assert (outputs["bored"].reason, outputs["bored"].detail) == (DoneReason.DEADLINE, "queue_timeout")
    assert outputs["patient"].reason is DoneReason.LENGTH


def test_outputs_can_be_forgotten_once_they_are_whole() -> None:
    scheduler = _scheduler()
    scheduler.submit(_request("a"))
    scheduler.forget("a")
    assert scheduler.output("a").reason is None
    scheduler.run_to_completion()
    scheduler.forget("a")
    scheduler.forget("nobody")
    assert scheduler.outputs() == {}
    with pytest.raises(KeyError):
        scheduler.output("a")


def test_running_with_nothing_to_do_ends_at_once() -> None:
    scheduler = _scheduler()
    assert not scheduler.run_tick()
    assert scheduler.run_to_completion() == {}


def test_a_bound_of_ticks_is_kept_to_the_tick() -> None:
    scheduler = _scheduler()
    scheduler.submit(_request("a", new=8))
    with pytest.raises(SchedulerStalled):
        scheduler.run_to_completion(max_ticks=7)
    assert scheduler.telemetry().ticks_total == 7
    assert len(scheduler.run_to_completion(max_ticks=2)["a"].tokens) == 8


def test_an_engine_that_raises_is_not_asked_again_and_the_run_does_not_hang() -> None:
    class Broken(Slow):
        def decode_batch(self, items: Sequence[DecodeItem]) -> list[StepResult]:
            raise MemoryError

    scheduler = _scheduler(Broken(_engine(), Clock()))
    scheduler.submit(_request("a"))
    with pytest.raises(MemoryError):
        scheduler.run_to_completion()
    with pytest.raises(SchedulerStalled, match="1 active"):
        scheduler.run_to_completion()


@pytest.mark.parametrize("token", [-1, 258, 1 << 40])
def test_tokens_outside_the_vocabulary_are_refused_before_anything_is_decided(token: int) -> None:
    scheduler = _scheduler()
    bad = GenerationRequest(session_id="bad", prompt_tokens=[1, token], max_new_tokens=1)
    with pytest.raises(InvalidRequest) as refused:
        scheduler.submit_many([_request("good"), bad])
    assert refused.value.field == "prompt"
    assert scheduler.telemetry().submitted_total == 0


# ---- threads


def _in_threads(count: int, body: Any) -> None:
    """Run ``body(number)`` in so many threads; the first failure is this test's."""
    failures: list[BaseException] = []

    def run(number: int) -> None:
        try:
            body(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads change places wherever they can
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(usual)
    assert not any(thread.is_alive() for thread in threads)
    if failures:
        raise failures[0]


@pytest.mark.parametrize("depth", [1, 2])
def test_threads_may_submit_look_and_cancel_while_another_runs(depth: int) -> None:
    scheduler = _scheduler(depth=depth, max_active=4, queue_depth=1000)
    requests = {f"t{thread}-{n}": _request(f"t{thread}-{n}", new=1 + n % 5) for thread in range(4) for n in range(12)}
    submitted = threading.Barrier(5)
    done = threading.Event()

    def client(thread: int) -> None:
        for number in range(12):
            assert scheduler.submit(requests[f"t{thread}-{number}"]).accepted
            assert scheduler.telemetry().balanced
        scheduler.submit(_request(f"cancelled-{thread}", new=90))
        assert scheduler.cancel(f"cancelled-{thread}")
        submitted.wait(60)

    def runner(_: int) -> None:
        while not done.is_set():  # takes the lock again and again, and must let the others have it between
            scheduler.run_to_completion()  # must not mistake a submission in between for a stall
        scheduler.run_to_completion()

    def all_of_them(number: int) -> None:
        if number < 4:
            client(number)
        elif number == 4:
            submitted.wait(60)
            done.set()
        else:
            runner(number)

    _in_threads(7, all_of_them)
    outputs = scheduler.run_to_completion()
    scheduler.check()
    for name, request in requests.items():
        assert outputs[name].tokens == _alone(request)
    assert {outputs[f"cancelled-{thread}"].reason for thread in range(4)} == {DoneReason.CANCELLED}
    seen = scheduler.telemetry()
    assert (seen.submitted_total, seen.done_total, seen.cancelled_total) == (52, 48, 4)


def test_a_submission_right_after_the_last_tick_is_no_stall() -> None:
    class Tempting(ContinuousBatchScheduler):
        """Another thread submits the moment a tick finds nothing to do."""

        submitter: threading.Thread | None = None

        def run_tick(self) -> bool:
            moved = super().run_tick()
            if not moved and self.submitter is None:
                self.submitter = threading.Thread(target=self.submit, args=(_request("late"),))
                self.submitter.start()
                self.submitter.join(0.1)  # it gets this long to slip in before the run looks at what is left
            return moved

    budget = NodeBudget(weight_bytes=1 << 30, kv_bytes=1 << 30, scratch_bytes=1 << 30)
    scheduler = Tempting(_engine(), budget)
    scheduler.submit(_request("early"))
    assert set(scheduler.run_to_completion()) == {"early"}
    assert scheduler.submitter is not None
    scheduler.submitter.join(60)
    assert len(scheduler.run_to_completion()["late"].tokens) == 8


def test_an_output_tells_the_prompt_from_the_answer() -> None:
    scheduler = _scheduler()
    scheduler.submit(_request("a", prompt=5, new=3))
    output: SessionOutput = scheduler.run_to_completion()["a"]
    assert output.sequence[:5].tolist() == list(_request("a", prompt=5).prompt_tokens)
    assert output.sequence[5:].tolist() == output.tokens
    assert len(output.token_times) == 3


def test_a_closed_scheduler_leaves_the_engine_to_another() -> None:
    engine = _engine(sessions=3)
    first = _scheduler(engine, max_active=1, cache_slots=2)
    first.submit(_request("kept", prompt=40))
    first.run_to_completion()
    first.submit_many([_request("runs", prompt=40), _request("waits")])
    first.run_tick()
    assert engine.kv_tokens > 0
    first.close()
    assert engine.kv_tokens == 0
    assert {name: output.reason for name, output in first.outputs().items()} == {
        "kept": DoneReason.LENGTH,
        "runs": DoneReason.CANCELLED,
        "waits": DoneReason.CANCELLED,
    }
    second = _scheduler(engine, max_active=1, cache_slots=2)
    second.submit(_request("again", prompt=40))
    assert second.run_to_completion()["again"].tokens == _alone(_request("again", prompt=40))
    second.check()
