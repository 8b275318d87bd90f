"""Prompts that begin alike, on real engines and real processes: computed once, and answered as without sharing."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from real_node import RealNode, wait_for

from treadle import Client
from treadle_broker import ContinuousBatchScheduler, SessionOutput
from treadle_shared import GenerationRequest, NodeBudget, SamplingParams, load_config
from treadle_shared.engine import BatchEngine
from treadle_worker.engines import make_engine

COMMON = 76  # tokens; the whole blocks of 8 are 72
CHOICES = (
    SamplingParams(ignore_eos=True),
    SamplingParams(ignore_eos=True, temperature=1.0, top_k=0, seed=5),
    SamplingParams(ignore_eos=True, temperature=0.8, seed=7, repeat_penalty=1.3, penalty_last_n=50),
    SamplingParams(ignore_eos=True, presence_penalty=0.5, penalty_last_n=90),
)
TEXT = "In this house we keep notes of every animal, plant and stone that we meet. " * 6


@pytest.fixture(scope="module", params=["reference", pytest.param("llama", marks=pytest.mark.model)])
def engine(request: pytest.FixtureRequest) -> Iterator[BatchEngine]:
    settings = {"engine": request.param, "max_sessions": 4, "session_tokens": 256, "cache_slots": 4, "threads": 1}
    if request.param == "llama":
        settings |= {"model": str(request.getfixturevalue("model_path")), "ubatch_tokens": 64, "numerics": "exact"}
    opened = make_engine(load_config(environ={}, flags=settings))
    yield opened
    close = getattr(opened, "close", None)
    if close is not None:
        close()


def scheduler_of(engine: BatchEngine, cache_slots: int, depth: int = 2, sessions: int = 4) -> ContinuousBatchScheduler:
    budget = NodeBudget(
        weight_bytes=engine.facts.weight_bytes,
        kv_bytes=6 * 256 * engine.facts.kv_bytes_per_token,
        scratch_bytes=1 << 40,
        max_active=sessions,
        max_prefill_tokens_per_tick=40,
        cache_slots=cache_slots,
    )
    return ContinuousBatchScheduler(engine, budget, depth=depth)


def requests() -> list[GenerationRequest]:
    """Twelve prompts: eight begin alike, four of them go on alike, four are like nobody's."""
    random = np.random.default_rng(3)
    common, more = random.integers(30, 200, COMMON).tolist(), random.integers(30, 200, 40).tolist()
    prompts = []
    for number in range(12):
        own = random.integers(30, 200, 3 + 2 * number).tolist()
        prompts.append([*(common if number % 3 else []), *(more if number % 3 == 2 else []), *own])
    return [
        GenerationRequest(
            session_id=f"s{number}", prompt_tokens=prompt, max_new_tokens=5 + number, params=CHOICES[number % 4]
        )
        for number, prompt in enumerate(prompts)
    ]


def answers(scheduler: ContinuousBatchScheduler) -> dict[str, SessionOutput]:
    scheduler.submit_many(requests())
    outputs = scheduler.run_to_completion()
    scheduler.check()
    return outputs


def empty(engine: BatchEngine) -> None:
    """Release what a scheduler has left in the engine's cache slots."""
    for slot in range(engine.facts.max_sequences):
        for gen in range(200):
            engine.release(slot, gen)
    assert engine.kv_tokens == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_answers_are_the_same_with_and_without_sharing(engine: BatchEngine, depth: int) -> None:
    alone = {name: output.tokens for name, output in answers(scheduler_of(engine, 0, sessions=1)).items()}
    scheduler = scheduler_of(engine, 2, depth)
    shared = answers(scheduler)
    assert {name: output.tokens for name, output in shared.items()} == alone
    seen = scheduler.telemetry()
    assert seen.prefix_hits_total >= 6
    assert seen.prefix_hit_rate > 0.4
    assert sum(output.cached_tokens for output in shared.values()) == seen.prefix_hit_tokens_total
    assert (seen.kv_bytes, seen.kv_cached_bytes) == (0, engine.kv_tokens * engine.facts.kv_bytes_per_token)
    assert seen.kv_cached_bytes > 0
    again = answers(scheduler)
    assert {name: output.tokens for name, output in again.items()} == alone
    empty(engine)


def converse(scheduler: ContinuousBatchScheduler, turns: int = 3) -> tuple[list[list[int]], list[int]]:
    """Four conversations at once, each turn's prompt all that was said before and a new question; the answers, and how
    many tokens of each later turn's prompt were there already.
    """
    random = np.random.default_rng(11)
    said = [random.integers(30, 200, 20 + number).tolist() for number in range(4)]
    answers, cached = [], []
    for turn in range(turns):
        ids = [f"{number}-{turn}" for number in range(4)]
        scheduler.submit_many(
            [
                GenerationRequest(session_id=name, prompt_tokens=list(said[number]), max_new_tokens=49, params=params)
                for number, (name, params) in enumerate(zip(ids, CHOICES, strict=True))
            ]
        )
        outputs = scheduler.run_to_completion()
        for number, name in enumerate(ids):
            answers.append(outputs[name].tokens)
            if turn:
                cached.append(len(said[number]) - outputs[name].cached_tokens)
            said[number] += [*outputs[name].tokens, *random.integers(30, 200, 7).tolist()]
    scheduler.check()
    return answers, cached


@pytest.mark.parametrize("depth", [1, 2])
def test_a_conversation_goes_on_behind_its_last_answer_and_says_the_same(engine: BatchEngine, depth: int) -> None:
    alone, _ = converse(scheduler_of(engine, 0, sessions=1))
    assert all(len(answer) == 49 for answer in alone)
    answers, computed = converse(scheduler_of(engine, 4, depth))
    assert answers == alone
    question, block, unconfirmed = 7, 8, 3
    assert max(computed) < question + block + unconfirmed
    empty(engine)


# ---- the service


def ask(client: Client, count: int, **options: Any) -> list[Any]:
    """So many questions on the same text, submitted together."""
    return client.submit_many(
        [{"prompt": f"{TEXT}Question {number}:", "max_tokens": 8, "seed": number, **options} for number in range(count)]
    )


def shared_by_a_node(node: RealNode) -> None:
    """Sixteen together compute the text once; idle, nothing is live, and what is kept is told."""
    with node.client() as client:
        sessions = ask(client, 16, temperature=0.9)
        together = [session.result() for session in sessions]
        common = min(session.prompt_tokens for session in sessions) - 16
        seen = node.wait_idle()
        assert sum(session.usage.cached_tokens == 0 for session in sessions) == 1
        assert all(session.usage.cached_tokens >= common - 16 for session in sessions[1:])
        assert seen["prefix_hit_tokens_total"] == sum(session.usage.cached_tokens for session in sessions)
        assert seen["prefix_hit_rate"] > 0.8
        assert seen["prefill_tokens_total"] < 2 * common + 16 * 40
        assert seen["kv_cached_bytes"] > 0
        assert client.status()["kv_drift_rows"] == 0
        salted = [session.result() for session in ask(client, 16, temperature=0.9, cache_salt="mine")]
        assert salted == together
        first = client.generate(f"{TEXT}Question 0:", max_tokens=8, seed=0, temperature=0.9, cache_salt="other")
        assert first.result() == together[0]
        assert first.usage.cached_tokens == 0


def test_sixteen_sessions_on_the_reference_engine_compute_their_text_once(make_node: Any) -> None:
    shared_by_a_node(make_node(engine="reference", session_tokens=1024).start().wait_ready())


@pytest.mark.model
def test_sixteen_sessions_on_the_demo_model_compute_their_text_once(make_node: Any, model_path: Path) -> None:
    settings = {"model": str(model_path), "session_tokens": 512, "threads": 1, "max_sessions": 16}
    shared_by_a_node(make_node(**settings).start().wait_ready())


def test_a_worker_that_dies_takes_the_cache_with_it_and_no_answer_changes(make_node: Any) -> None:
    node = make_node(engine="reference", session_tokens=1024).start().wait_ready()
    with node.client() as client:
        expected = [session.result() for session in ask(client, 8, max_tokens=60, ignore_eos=True, temperature=0.5)]
        sessions = ask(client, 8, max_tokens=60, ignore_eos=True, temperature=0.5)
        before = client.telemetry()["decode_tokens_total"]
        wait_for(lambda: client.telemetry()["decode_tokens_total"] > before + 8, "they decode")
        node.kill("worker", signal.SIGKILL)
        node.processes["worker"].wait(10.0)
        wait_for(lambda: not client.status()["ready"], "the loss is seen")
        assert client.telemetry()["kv_cached_bytes"] == 0
        node.start("worker")
        assert [session.result() for session in sessions] == expected
        assert node.wait_idle()["kv_cached_bytes"] > 0
        assert client.status()["kv_drift_rows"] == 0


def test_clients_of_one_user_share_unless_they_are_kept_apart(make_node: Any) -> None:
    for sharing, cached in ((None, True), ("client", False), ("off", False)):
        node = make_node(engine="reference", session_tokens=1024, prefix_sharing=sharing).start().wait_ready()
        for turn in range(2):
            with node.client() as client:
                session = client.generate(TEXT, max_tokens=2)
                session.result()
                assert bool(session.usage.cached_tokens) is (cached and turn == 1)
        node.stop()
