"""llama.cpp's sequences change places while they run, and nobody can tell by what they say."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from treadle_shared.config import make_config
from treadle_shared.engine import CopyItem, DecodeItem, PrefillItem, StepResult, TokenLogprobs
from treadle_shared.sampling import SamplingParams
from treadle_worker import LlamaEngine

pytestmark = pytest.mark.model

SLOTS = 6
STEPS = 12
CHOICES = (
    SamplingParams(temperature=0.0, logprobs=20),
    SamplingParams(temperature=1.0, top_k=0, seed=11, logprobs=20),
    SamplingParams(repeat_penalty=1.4, penalty_last_n=60, seed=1, temperature=0.6, logprobs=5),
)

Trace = list[tuple[int | None, TokenLogprobs | None]]


@dataclass
class Said:
    """A session in the engine: its job, where its sequence is, and what came out so far."""

    job: int
    slot: int
    epoch: int
    rows: int
    trace: Trace = field(default_factory=list)
    parked: bool = False


@pytest.fixture(scope="module", params=["exact", "fast"])
def engine(model_path: Path, request: pytest.FixtureRequest) -> Iterator[LlamaEngine]:
    settings = {"model": str(model_path), "max_sessions": SLOTS, "session_tokens": 256, "threads": 1, "cache_slots": 2}
    opened = LlamaEngine(make_config(settings | {"numerics": request.param}))
    yield opened
    assert opened.kv_tokens == 0
    assert opened.places == {}
    opened.close()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    chance = np.random.default_rng(3)
    return [chance.integers(100, 40_000, 10 + 7 * number).tolist() for number in range(8)]


@pytest.fixture(scope="module")
def alone(engine: LlamaEngine, prompts: list[list[int]]) -> list[Trace]:
    """What each job says when nobody else is there."""
    traces = []
    for number in range(len(prompts)):
        said = opened(engine, number, prompts, slot=0, epoch=0)
        for _ in range(STEPS):
            decode(engine, [said])
        engine.release(0, 0)
        traces.append(said.trace)
    return traces


def shown(step: StepResult) -> tuple[int | None, TokenLogprobs | None]:
    assert not step.cache_miss
    return step.token, step.logprobs


def params(job: int) -> SamplingParams:
    return CHOICES[job % len(CHOICES)]


def opened(engine: LlamaEngine, job: int, prompts: list[list[int]], slot: int, epoch: int) -> Said:
    prompt = prompts[job]
    [step] = engine.prefill([PrefillItem(slot, epoch, 0, prompt, True, 0, params(job))])
    return Said(job, slot, epoch, len(prompt), [shown(step)])


def decode(engine: LlamaEngine, several: list[Said]) -> None:
    steps = engine.decode_batch([DecodeItem(said.slot, said.epoch, said.rows) for said in several])
    for said, step in zip(several, steps, strict=True):
        said.rows += 1
        said.trace.append(shown(step))


def side_by_side(engine: LlamaEngine, several: list[Said]) -> bool:
    places = sorted(engine.places[said.slot] for said in several)
    return places == [*range(places[0], places[0] + len(places))]


def test_whoever_ends_leaves_no_gap(engine: LlamaEngine, prompts: list[list[int]], alone: list[Trace]) -> None:
    several = [opened(engine, job, prompts, slot=job, epoch=job) for job in range(SLOTS)]
    for ending in (1, 3, 4):
        decode(engine, several)
        several = [said for said in several if said.slot != ending]
        engine.release(ending, ending)
        decode(engine, several)  # which counts what the gap costs
        decode(engine, several)
        assert side_by_side(engine, several)
    for said in several:
        engine.release(said.slot, said.epoch)
        if engine.facts.exact:
            assert said.trace == alone[said.job][: len(said.trace)]


@pytest.mark.parametrize("seed", range(3))
def test_a_walk_of_ends_parks_and_copies(
    engine: LlamaEngine, prompts: list[list[int]], alone: list[Trace], seed: int
) -> None:
    """Sessions begin, whole, in pieces or as copies, end, wait in host memory and come back elsewhere; some decode."""
    chance = random.Random(seed)
    here: list[Said] = []
    ran: list[Said] = []
    moved = 0
    for epoch in range(1, 120):
        free = sorted(set(range(SLOTS)) - {said.slot for said in here if not said.parked})
        awake = [said for said in here if not said.parked and len(said.trace) <= STEPS]
        asleep = [said for said in here if said.parked]
        choice = chance.random()
        if free and choice < 0.25:
            here.append(begun(engine, prompts, chance, awake, chance.choice(free), epoch))
        elif free and asleep and choice < 0.33:
            wake(engine, chance.choice(asleep), free[-1], epoch)
        elif awake and choice < 0.38:
            park(engine, chance.choice(awake))
        elif here and choice < 0.45:
            gone = chance.choice(here)
            here.remove(gone)
            engine.release(gone.slot, gone.epoch)
            ran.append(gone)
        elif awake:
            several = [said for said in awake if chance.random() < 0.9] or awake
            before = engine.places
            decode(engine, several)
            moved += engine.places != before
    for said in here:
        engine.release(said.slot, said.epoch)
    assert moved > 0
    assert len(ran) > 5
    if engine.facts.exact:
        for said in [*ran, *here]:
            assert said.trace == alone[said.job][: len(said.trace)]


def begun(
    engine: LlamaEngine, prompts: list[list[int]], chance: random.Random, awake: list[Said], slot: int, epoch: int
) -> Said:
    sources = [said for said in awake if said.job > 0]
    if sources and chance.random() < 0.4:
        return copied(engine, prompts, chance.choice(sources), slot, epoch)
    job = chance.randrange(len(prompts))
    prompt = prompts[job]
    if chance.random() < 0.5:
        return opened(engine, job, prompts, slot, epoch)
    engine.prefill([PrefillItem(slot, epoch, 0, prompt[:6], False, 0, params(job))])
    [step] = engine.prefill([PrefillItem(slot, epoch, 6, prompt[6:], True)])
    return Said(job, slot, epoch, len(prompt), [shown(step)])


def copied(engine: LlamaEngine, prompts: list[list[int]], source: Said, slot: int, epoch: int) -> Said:
    """The same job once more, from the first rows of one that runs."""
    prompt, rows = prompts[source.job], len(prompts[source.job]) - 3
    item = CopyItem(source.slot, source.epoch, slot, epoch, rows, params(source.job), prompt[:rows])
    assert engine.copy(item)
    [step] = engine.prefill([PrefillItem(slot, epoch, rows, prompt[rows:], True)])
    return Said(source.job, slot, epoch, len(prompt), [shown(step)])


def park(engine: LlamaEngine, said: Said) -> None:
    assert engine.park(said.slot, said.epoch)
    said.parked = True


def wake(engine: LlamaEngine, said: Said, slot: int, epoch: int) -> None:
    assert engine.restore(said.slot, said.epoch, slot, epoch)
    said.slot, said.epoch, said.parked = slot, epoch, False
