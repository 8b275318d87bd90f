"""Sixteen sessions in four slots: they take turns, and each gets the tokens that it gets alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from real_node import RealNode, wait_for

from treadle_broker import ContinuousBatchScheduler
from treadle_broker.embedded import SessionOutput
from treadle_broker.node_facts import derive_budget
from treadle_shared.config import NodeConfig, make_config
from treadle_shared.engine import BatchEngine
from treadle_shared.request import GenerationRequest
from treadle_shared.sampling import SamplingParams
from treadle_worker.engines import make_engine

SESSIONS, SLOTS, SLICE = 16, 4, 6
MIN_PARKS = 20
CHOICES = (
    SamplingParams(ignore_eos=True),
    SamplingParams(temperature=1.0, top_k=0, ignore_eos=True),
    SamplingParams(repeat_penalty=1.3, presence_penalty=0.2, penalty_last_n=20, ignore_eos=True),
    SamplingParams(temperature=0.8, top_p=0.9, frequency_penalty=0.3),
)


def config(**settings: Any) -> NodeConfig:
    """A node of 16 sessions in 4 slots."""
    turns = {"kv_policy": "optimistic", "max_sessions": SESSIONS, "slots": SLOTS, "slice_tokens": SLICE}
    return make_config({"session_tokens": 128, "threads": 1, **turns, **settings})


def requests(n_vocab: int, longest: int) -> list[GenerationRequest]:
    """Every way of choosing a token, prompts and answers of different lengths."""
    draw = random.Random(5)
    return [
        GenerationRequest(
            session_id=f"s{number}",
            prompt_tokens=[draw.randrange(20, n_vocab - 10) for _ in range(draw.choice([2, 7, 23, 40]))],
            max_new_tokens=draw.randint(longest // 2, longest),
            params=SamplingParams(**{**_fields(CHOICES[number % 4]), "seed": 100 + number}),
        )
        for number in range(SESSIONS)
    ]


def _fields(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in params.__struct_fields__}


def alone(engine: BatchEngine, settings: NodeConfig, jobs: list[GenerationRequest]) -> dict[str, list[int]]:
    """Each job with nobody beside it."""
    found = {}
    for job in jobs:
        scheduler = ContinuousBatchScheduler(engine, derive_budget(settings, engine.facts))
        scheduler.submit(job)
        found[job.session_id] = scheduler.run_to_completion()[job.session_id].tokens
        scheduler.close()
        assert engine.kv_tokens == 0
    return found


def together(
    engine: BatchEngine, settings: NodeConfig, jobs: list[GenerationRequest], depth: int
) -> tuple[dict[str, SessionOutput], ContinuousBatchScheduler]:
    """All jobs at once, in turns."""
    scheduler = ContinuousBatchScheduler(engine, derive_budget(settings, engine.facts), depth=depth)
    decisions = scheduler.submit_many(jobs)
    assert {decision.reason.value for decision in decisions} == {"ADMITTED"}
    assert scheduler.telemetry().active_sessions == SESSIONS
    outputs = scheduler.run_to_completion()
    scheduler.check()
    return outputs, scheduler


def longest_pause(outputs: dict[str, SessionOutput]) -> float:
    """Seconds between two tokens of one session."""
    return max(later - earlier for one in outputs.values() for earlier, later in pairwise(one.token_times))


def check_turns(
    engine: BatchEngine, settings: NodeConfig, jobs: list[GenerationRequest], expected: dict[str, list[int]], depth: int
) -> ContinuousBatchScheduler:
    outputs, scheduler = together(engine, settings, jobs, depth)
    assert {name: output.tokens for name, output in outputs.items()} == expected
    seen = scheduler.telemetry()
    assert (seen.failed_total, seen.cancelled_total, seen.done_total) == (0, 0, SESSIONS)
    assert seen.parks_total >= MIN_PARKS
    assert (seen.kv_bytes, seen.parked_sessions, seen.parked_bytes) == (0, 0, 0)
    assert engine.kv_tokens * engine.facts.kv_bytes_per_token == seen.kv_cached_bytes
    print(
        f"{seen.parks_total} parks, {seen.park_drops_total} computed anew, longest pause {longest_pause(outputs):.2f} s"
    )
    return scheduler


# ---- the reference engine


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("more", [{}, {"park_bytes": 0}, {"park_bytes": 60_000}, {"kv_bytes": 100 * 1536}])
def test_the_reference_engine_in_turns_is_the_reference_engine(depth: int, more: dict[str, Any]) -> None:
    settings = config(engine="reference", **more)
    engine = make_engine(settings)
    jobs = requests(engine.facts.n_vocab, 40)
    scheduler = check_turns(engine, settings, jobs, alone(engine, config(engine="reference"), jobs), depth)
    drops = scheduler.telemetry().park_drops_total
    assert (drops > 0) == ("park_bytes" in more)


# ---- llama.cpp


@pytest.fixture(scope="module")
def llama(model_path: Path) -> Iterator[tuple[BatchEngine, NodeConfig, list[GenerationRequest], dict[str, list[int]]]]:
    settings = config(model=str(model_path), numerics="exact")
    engine = make_engine(settings)
    jobs = requests(engine.facts.n_vocab, 16)
    yield engine, settings, jobs, alone(engine, settings, jobs)
    engine.close()  # type: ignore[attr-defined]


@pytest.mark.model
@pytest.mark.parametrize("park_bytes", [None, 0])
def test_the_demo_model_in_turns_gives_the_tokens_it_gives_alone(llama: Any, park_bytes: int | None) -> None:
    engine, settings, jobs, expected = llama
    small = {"park_bytes": park_bytes} if park_bytes is not None else {}
    settings = config(model=settings.model, numerics="exact", **small)
    scheduler = check_turns(engine, settings, jobs, expected, depth=2)
    scheduler.close()
    drops, parks = scheduler.telemetry().park_drops_total, scheduler.telemetry().parks_total
    assert drops == (0 if park_bytes is None else parks)


@pytest.mark.model
def test_a_parked_state_of_the_demo_model_is_as_large_as_its_facts_say(llama: Any) -> None:
    engine, settings, jobs, _ = llama
    facts = engine.facts
    assert facts.can_park
    assert facts.park_tokens_per_s > facts.prefill_tokens_per_s
    scheduler = ContinuousBatchScheduler(engine, derive_budget(settings, facts))
    scheduler.submit_many(jobs)
    held = []
    while scheduler.run_tick():
        seen = scheduler.telemetry()
        bound = scheduler._scheduler._roster.parking.bytes_held
        assert seen.parked_bytes <= bound <= seen.park_budget_bytes
        held.append(seen.parked_bytes)
    assert max(held) > facts.kv_bytes_per_token * 20
    assert held[-1] == engine.parked_bytes == 0


# ---- real processes


def _answer(node: RealNode, number: int) -> list[int]:
    with node.client() as client:
        session = client.generate(
            f"{number} sheep " * (1 + number % 5), max_tokens=150, temperature=0.9, seed=number, ignore_eos=True
        )
        session.result()
        return session.tokens


def test_a_node_serves_four_times_its_slots_and_a_dead_worker_takes_nothing_away(make_node: Any) -> None:
    settings = {"max_sessions": SESSIONS, "slots": SLOTS, "kv_policy": "optimistic", "slice_tokens": 16}
    node = make_node(engine="reference", **settings).start().wait_ready()
    with ThreadPoolExecutor(SESSIONS) as pool:
        answers = [pool.submit(_answer, node, number) for number in range(SESSIONS)]
        wait_for(lambda: node.telemetry()["parks_total"] >= MIN_PARKS, "sessions take turns")
        seen = node.telemetry()
        assert seen["active_sessions"] == SESSIONS
        assert 0 < seen["parked_bytes"] <= seen["park_budget_bytes"]
        node.kill("worker")
        node.processes["worker"].wait()
        node.start("worker")
        found = [answer.result() for answer in answers]
    seen = node.wait_idle()
    wait_for(lambda: node.telemetry()["parked_bytes"] == 0, "nothing is parked")
    assert seen["failed_total"] == 0
    assert seen["batch_occupancy_max"] == SLOTS
    with node.client() as client:
        status = client.status()
    assert status["kv_drift_rows"] == 0
    assert status["limits"]["slots"] == SLOTS
    assert found == [_answer(node, number) for number in range(SESSIONS)]
