"""What the requirements ask to be shown, on the in-process scheduler with the real reference engine."""

from __future__ import annotations

import json
from typing import Any

import pytest

from treadle_broker import ContinuousBatchScheduler, SchedulerStalled, run_concurrency_sweep
from treadle_shared import (
    AdmissionReason,
    DoneReason,
    GenerationRequest,
    NodeBudget,
    SamplingParams,
    SchedulerTelemetry,
    load_config,
)
from treadle_shared.errors import PartialShardError, WeightBudgetError
from treadle_worker.reference import (
    KvBatchEngine,
    KvBoundaryAdapter,
    ReferenceModel,
    SessionCache,
    build_reference_engine,
)

KV_BYTES = 1536  # the reference engine's KV of one token
TABLE = {  # concurrency: ticks, average and maximum occupancy, tokens a tick, peak KV bytes
    1: (64, 1.000, 1, 1.375, 15360),
    2: (33, 1.750, 2, 2.667, 29184),
    4: (19, 3.111, 4, 4.632, 52224),
    8: (15, 4.000, 7, 5.867, 75264),
}


class Clock:
    """Time that moves only when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Recorder:
    """An engine that notes the order of its calls."""

    def __init__(self, engine: KvBatchEngine) -> None:
        self._engine = engine
        self.calls: list[tuple[str, list[int | str]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def prefill(self, items: Any) -> Any:
        self.calls.append(("prefill", [item.session for item in items]))
        return self._engine.prefill(items)

    def decode_batch(self, items: Any) -> Any:
        self.calls.append(("decode", [item.session for item in items]))
        return self._engine.decode_batch(items)


def _engine(sessions: int = 8, tokens: int = 64, seed: int = 0) -> KvBatchEngine:
    settings = {"engine": "reference", "max_sessions": sessions, "session_tokens": tokens, "reference_seed": seed}
    settings["cache_slots"] = 0
    return build_reference_engine(load_config(environ={}, flags=settings))


def _budget(**changes: int) -> NodeBudget:
    settings = {"weight_bytes": 1 << 30, "kv_bytes": 1 << 30, "scratch_bytes": 1 << 30, "max_active": 8}
    return NodeBudget(**{**settings, **changes})


def _scheduler(engine: Any = None, clock: Clock | None = None, **changes: int) -> ContinuousBatchScheduler:
    return ContinuousBatchScheduler(engine or _engine(), _budget(**changes), clock=clock or Clock(), seed=1)


def _request(name: str, prompt: int = 4, new: int = 8, **options: Any) -> GenerationRequest:
    tokens = [(17 * place + 5 * len(name) + ord(name[-1])) % 256 for place in range(prompt)]
    params = SamplingParams(ignore_eos=True, seed=0)
    return GenerationRequest(session_id=name, prompt_tokens=tokens, max_new_tokens=new, params=params, **options)


def _alone(request: GenerationRequest) -> list[int]:
    scheduler = _scheduler()
    scheduler.submit(request)
    return scheduler.run_to_completion()[request.session_id].tokens


# ---- admission


def test_sessions_beyond_the_active_cap_wait() -> None:
    scheduler = _scheduler(max_active=2)
    reasons = [scheduler.submit(_request(name)).reason for name in "abc"]
    assert reasons == [AdmissionReason.ADMITTED, AdmissionReason.ADMITTED, AdmissionReason.QUEUED]


def test_the_scratch_envelope_caps_the_active_sessions() -> None:
    scheduler = _scheduler(scratch_bytes=2500, scratch_bytes_per_session=1000)
    assert _budget(scratch_bytes=2500, scratch_bytes_per_session=1000).effective_active_cap == 2
    reasons = [scheduler.submit(_request(name)).reason for name in "abc"]
    assert reasons.count(AdmissionReason.ADMITTED) == 2
    assert scheduler.telemetry().scratch_bytes == 2000


def test_scratch_over_its_envelope_is_refused_with_the_numbers() -> None:
    scheduler = _scheduler(scratch_bytes=999, scratch_bytes_per_session=1000)
    decision = scheduler.submit(_request("a"))
    assert decision.reason is AdmissionReason.REJECTED_SCRATCH_BUDGET
    assert (decision.budget, decision.needed, decision.limit) == ("scratch_bytes", 1000, 999)


def test_a_session_over_the_kv_budget_is_refused_with_the_numbers() -> None:
    scheduler = _scheduler(kv_bytes=11 * KV_BYTES)
    decision = scheduler.submit(_request("a", prompt=4, new=8))
    assert decision.reason is AdmissionReason.REJECTED_KV_BUDGET
    assert (decision.budget, decision.needed, decision.limit) == ("kv_bytes", 12 * KV_BYTES, 11 * KV_BYTES)
    assert scheduler.submit(_request("b", prompt=4, new=7)).reason is AdmissionReason.ADMITTED


def test_a_session_that_fits_alone_waits_while_others_hold_the_kv() -> None:
    scheduler = _scheduler(kv_bytes=20 * KV_BYTES)
    assert scheduler.submit(_request("a")).reason is AdmissionReason.ADMITTED
    assert scheduler.submit(_request("b")).reason is AdmissionReason.QUEUED
    assert {output.reason for output in scheduler.run_to_completion().values()} == {DoneReason.LENGTH}


def test_a_session_beyond_the_engines_context_is_refused() -> None:
    decision = _scheduler().submit(_request("a", prompt=60, new=5))
    assert decision.reason is AdmissionReason.REJECTED_CONTEXT
    assert (decision.needed, decision.limit) == (65, 64)


def test_a_live_id_is_a_duplicate_and_free_again_afterwards() -> None:
    scheduler = _scheduler()
    first = scheduler.submit(_request("a"))
    assert scheduler.submit(_request("a")).reason is AdmissionReason.REJECTED_DUPLICATE
    scheduler.run_to_completion()
    assert scheduler.submit(_request("a")).epoch == first.epoch + 1


def test_a_full_queue_pushes_back_and_takes_again_when_it_has_drained() -> None:
    scheduler = _scheduler(max_active=1, queue_depth=2)
    decisions = [scheduler.submit(_request(name)) for name in "abcd"]
    assert [decision.reason for decision in decisions[:3]] == [
        AdmissionReason.ADMITTED,
        AdmissionReason.QUEUED,
        AdmissionReason.QUEUED,
    ]
    refused = decisions[3]
    assert refused.reason is AdmissionReason.REJECTED_QUEUE_FULL
    assert (refused.budget, refused.needed, refused.available, refused.limit) == ("queue_depth", 1, 0, 2)
    assert refused.retry_after_s is not None
    assert refused.retry_after_s > 0
    scheduler.run_to_completion()
    assert scheduler.submit(_request("e")).reason is AdmissionReason.ADMITTED


def test_a_queue_depth_of_zero_admits_or_refuses() -> None:
    scheduler = _scheduler(max_active=1, queue_depth=0)
    reasons = [scheduler.submit(_request(name)).reason for name in "ab"]
    assert reasons == [AdmissionReason.ADMITTED, AdmissionReason.REJECTED_QUEUE_FULL]


def test_a_group_is_taken_whole_or_not_at_all() -> None:
    scheduler = _scheduler(max_active=1, queue_depth=1)
    refused = scheduler.submit_many([_request(name) for name in "abc"])
    assert {decision.reason for decision in refused} == {AdmissionReason.REJECTED_QUEUE_FULL}
    assert scheduler.telemetry().active_sessions == 0
    taken = scheduler.submit_many([_request(name) for name in "ab"])
    assert [decision.reason for decision in taken] == [AdmissionReason.ADMITTED, AdmissionReason.QUEUED]
    scheduler.check()


def test_the_weight_footprint_is_reported_and_held_to_its_budget() -> None:
    engine = _engine()
    seen = _scheduler(engine).telemetry()
    assert seen.weight_bytes == engine.facts.weight_bytes > 0
    with pytest.raises(WeightBudgetError) as refused:
        _scheduler(engine, weight_bytes=engine.facts.weight_bytes - 1)
    assert refused.value.needed == engine.facts.weight_bytes


# ---- batching


def test_four_divergent_sessions_in_one_batch_each_equal_their_own_reference() -> None:
    requests = [_request(name, prompt=length) for name, length in zip("abcd", (2, 5, 9, 4), strict=True)]
    scheduler = _scheduler(max_prefill_tokens_per_tick=64)
    for request in requests:
        scheduler.submit(request)
    outputs = scheduler.run_to_completion()
    assert scheduler.telemetry().batch_occupancy_max == 4
    assert len({tuple(output.tokens) for output in outputs.values()}) == 4
    assert {request.session_id: _alone(request) for request in requests} == {
        session_id: output.tokens for session_id, output in outputs.items()
    }


def test_positions_are_isolated_for_prompts_of_1_3_and_7_tokens() -> None:
    requests = [_request(f"p{length}", prompt=length) for length in (1, 3, 7)]
    scheduler = _scheduler(max_prefill_tokens_per_tick=64)
    scheduler.submit_many(requests)
    outputs = scheduler.run_to_completion()
    for request in requests:
        assert outputs[request.session_id].tokens == _alone(request)


def test_a_running_session_decodes_on_every_tick_of_a_prefill_burst() -> None:
    recorder = Recorder(_engine())
    scheduler = _scheduler(recorder, max_prefill_tokens_per_tick=4)
    scheduler.submit(_request("first", new=20))
    scheduler.run_tick()
    scheduler.submit_many([_request(name) for name in "abcd"])
    recorder.calls.clear()
    for _ in range(4):
        scheduler.run_tick()
    decodes = [sessions for kind, sessions in recorder.calls if kind == "decode"]
    prefills = [sessions for kind, sessions in recorder.calls if kind == "prefill"]
    assert len(decodes) == 4
    assert all(0 in sessions for sessions in decodes)
    assert [len(sessions) for sessions in prefills] == [1, 1, 1, 1]


def test_within_a_tick_decode_runs_before_prefill() -> None:
    recorder = Recorder(_engine())
    scheduler = _scheduler(recorder)
    scheduler.submit(_request("a"))
    scheduler.run_tick()
    scheduler.submit(_request("b"))
    recorder.calls.clear()
    scheduler.run_tick()
    assert [kind for kind, _ in recorder.calls] == ["decode", "prefill"]


def test_a_prompt_longer_than_the_cap_still_makes_progress() -> None:
    scheduler = _scheduler(max_prefill_tokens_per_tick=3)
    request = _request("long", prompt=20, new=3)
    scheduler.submit(request)
    assert scheduler.run_to_completion()["long"].tokens == _alone(request)
    assert scheduler.telemetry().ticks_total == 7 + 2


def test_more_sessions_than_a_batch_holds_all_get_their_turn() -> None:
    scheduler = _scheduler(max_batch_size=3, max_prefill_tokens_per_tick=64)
    requests = [_request(name, new=10) for name in "abcdefgh"]
    scheduler.submit_many(requests)
    lengths: list[int] = []
    for _ in range(12):
        scheduler.run_tick()
        lengths = [len(output.tokens) for output in scheduler.outputs().values()]
    assert max(lengths) - min(lengths) <= 1
    outputs = scheduler.run_to_completion()
    assert all(outputs[request.session_id].tokens == _alone(request) for request in requests)


def test_finished_sessions_give_their_kv_back() -> None:
    engine = _engine()
    scheduler = _scheduler(engine)
    scheduler.submit_many([_request(name) for name in "abcd"])
    scheduler.run_tick()
    assert scheduler.telemetry().kv_bytes > 0
    scheduler.run_to_completion()
    assert scheduler.telemetry().kv_bytes == 0
    assert engine.kv_tokens == 0
    scheduler.check()


def test_an_evicted_session_ends_with_a_cache_miss_and_never_a_wrong_token() -> None:
    settings = {"engine": "reference", "max_sessions": 4, "session_tokens": 64, "kv_bytes": 20 * KV_BYTES}
    scheduler = _scheduler(build_reference_engine(load_config(environ={}, flags=settings)))
    requests = [_request(name, new=10) for name in "ab"]
    scheduler.submit_many(requests)
    outputs = scheduler.run_to_completion()
    reasons = [output.reason for output in outputs.values()]
    assert DoneReason.CACHE_MISS in reasons
    for request in requests:
        tokens = outputs[request.session_id].tokens
        assert tokens == _alone(request)[: len(tokens)]


def test_a_partial_shard_is_refused() -> None:
    adapter = KvBoundaryAdapter(ReferenceModel(), 0, 1)
    with pytest.raises(PartialShardError):
        KvBatchEngine(adapter, SessionCache(adapter, budget_bytes=1 << 20), context_tokens=64, max_sequences=1)


def test_a_run_that_cannot_end_is_bounded() -> None:
    scheduler = _scheduler()
    scheduler.submit(_request("a", new=20))
    with pytest.raises(SchedulerStalled, match="1 active"):
        scheduler.run_to_completion(max_ticks=5)


# ---- telemetry


def test_every_signal_is_present_and_json_safe() -> None:
    facts = _scheduler().telemetry().to_dict()
    assert set(facts) == set(SchedulerTelemetry.__struct_fields__)
    assert len(facts) == 35
    json.dumps(facts, allow_nan=False)


def test_rates_follow_the_injected_clock() -> None:
    def rates() -> list[tuple[float, float]]:
        clock = Clock()
        scheduler = _scheduler(clock=clock)
        scheduler.submit_many([_request(name) for name in "abcd"])
        seen = []
        while scheduler.run_tick():
            clock.now += 0.25
            snapshot = scheduler.telemetry()
            seen.append((snapshot.prefill_tokens_per_s, snapshot.decode_tokens_per_s))
        return seen

    first = rates()
    assert first == rates()
    assert max(decode for _, decode in first) > 0
    assert max(prefill for prefill, _ in first) > 0


def test_rates_fall_to_zero_when_nothing_runs() -> None:
    clock = Clock()
    scheduler = _scheduler(clock=clock)
    scheduler.submit(_request("a"))
    scheduler.run_to_completion()
    clock.now += 60
    assert scheduler.telemetry().decode_tokens_per_s == 0.0


# ---- the sweep


@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.parametrize("depth", [1, 2])
def test_the_sweep_gives_the_table_to_the_digit(depth: int, seed: int) -> None:
    sweep = run_concurrency_sweep(lambda level: _engine(level, seed=seed), depth=depth)
    found = {
        level.concurrency: (
            level.ticks,
            round(level.avg_occupancy, 3),
            level.max_occupancy,
            round(level.tokens_per_tick, 3),
            level.peak_kv_bytes,
        )
        for level in sweep.levels
    }
    assert found == TABLE
    assert sweep.saturation_concurrency == 8
    assert sweep.corruption_free
    assert (sweep.cache_misses, sweep.rejected_admissions) == (0, 0)


def test_a_small_load_saturates_below_the_highest_level() -> None:
    sweep = run_concurrency_sweep(_engine, jobs=3)
    assert sweep.saturation_concurrency == 4
    assert sweep.corruption_free


def test_a_corrupted_level_is_found() -> None:
    sweep = run_concurrency_sweep(lambda level: _engine(level, seed=0 if level < 4 else 1), jobs=3)
    assert not sweep.corruption_free
