"""Copied beginnings on llama.cpp: bit by bit what the prompt alone gives, whatever its source does meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from treadle_shared.config import make_config
from treadle_shared.engine import CopyingEngine, CopyItem, DecodeItem, PrefillItem, StepResult, TokenLogprobs
from treadle_shared.sampling import SamplingParams
from treadle_worker import LlamaEngine

pytestmark = pytest.mark.model

STEPS = 5
ROWS = 48
SAMPLED = SamplingParams(temperature=1.0, top_k=0, seed=11, logprobs=20)
PENALISED = SamplingParams(repeat_penalty=1.4, penalty_last_n=60, seed=1, temperature=0.6, logprobs=5)

Trace = list[tuple[int | None, TokenLogprobs | None]]


@pytest.fixture(scope="module")
def engine(model_path: Path) -> Iterator[LlamaEngine]:
    settings = {"model": str(model_path), "max_sessions": 3, "session_tokens": 256, "threads": 1, "cache_slots": 2}
    opened = LlamaEngine(make_config(settings))
    yield opened
    assert opened.kv_tokens == 0
    opened.close()


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    found: list[int] = np.random.default_rng(7).integers(100, 40_000, 90).tolist()
    return found


def shown(step: StepResult) -> tuple[int | None, TokenLogprobs | None]:
    assert not step.cache_miss
    return step.token, step.logprobs


def opened(engine: LlamaEngine, slot: int, prompt: list[int], params: SamplingParams) -> Trace:
    return [shown(step) for step in engine.prefill([PrefillItem(slot, 1, 0, prompt, True, 0, params)])]


def gone_on(engine: LlamaEngine, slots: list[int], length: int, traces: list[Trace]) -> None:
    """A few decode rows of every slot, in one batch."""
    for number in range(STEPS):
        for trace, step in zip(
            traces, engine.decode_batch([DecodeItem(slot, 1, length + number) for slot in slots]), strict=True
        ):
            trace.append(shown(step))


def alone(engine: LlamaEngine, prompt: list[int], params: SamplingParams) -> Trace:
    trace = opened(engine, 0, prompt, params)
    gone_on(engine, [0], len(prompt), [trace])
    engine.release(0, 1)
    return trace


def copied(engine: LlamaEngine, source: int, slot: int, prompt: list[int], params: SamplingParams) -> Trace:
    assert engine.copy(CopyItem(source, 1, slot, 1, ROWS, params, prompt[:ROWS]))
    return [shown(step) for step in engine.prefill([PrefillItem(slot, 1, ROWS, prompt[ROWS:], True)])]


@pytest.mark.parametrize("params", [SAMPLED, PENALISED])
def test_a_copy_of_a_running_sequence_is_the_prompt_bit_by_bit(
    engine: LlamaEngine, prompt: list[int], params: SamplingParams
) -> None:
    expected = alone(engine, prompt, params)
    source = opened(engine, 0, prompt, params)
    source += [shown(step) for step in engine.decode_batch([DecodeItem(0, 1, len(prompt))])]
    first = copied(engine, 0, 1, prompt, params)
    assert engine.kv_tokens == 91 + 90
    second = copied(engine, 1, 2, prompt, params)
    gone_on(engine, [1, 2], len(prompt), [first, second])
    assert first == second == expected
    assert source == expected[:2]
    for slot in range(3):
        engine.release(slot, 1)


def test_what_is_kept_outlives_its_source_without_a_batch_in_between(engine: LlamaEngine, prompt: list[int]) -> None:
    assert engine.facts.can_copy
    assert isinstance(engine, CopyingEngine)
    assert engine.facts.max_sequences == 5
    expected = alone(engine, prompt, SAMPLED)
    opened(engine, 0, prompt, SAMPLED)
    assert engine.copy(CopyItem(0, 1, 3, 1, 64))
    engine.release(0, 1)
    assert engine.kv_tokens == 64
    other = opened(engine, 0, prompt[::-1], SAMPLED)  # its rows go where the kept ones came from
    found = copied(engine, 3, 1, prompt, SAMPLED)
    gone_on(engine, [1], len(prompt), [found])
    assert found == expected
    assert other == alone_again(engine, prompt[::-1])
    for slot in (1, 3):
        engine.release(slot, 1)


def test_a_parked_sequence_comes_back_where_something_is_still_to_be_copied_from(
    engine: LlamaEngine, prompt: list[int]
) -> None:
    kept_alone, parked_alone = alone(engine, prompt, SAMPLED), alone(engine, prompt[::-1], PENALISED)
    back = opened(engine, 1, prompt[::-1], PENALISED)
    assert engine.park(1, 1)
    opened(engine, 0, prompt, SAMPLED)
    assert engine.copy(CopyItem(0, 1, 3, 1, 64))
    engine.release(0, 1)
    assert engine.restore(1, 1, 0, 1)  # into the very slot, with no batch in between
    gone_on(engine, [0], len(prompt), [back])
    assert back == parked_alone
    found = copied(engine, 3, 1, prompt, SAMPLED)
    gone_on(engine, [1], len(prompt), [found])
    assert found == kept_alone
    for slot in (0, 1, 3):
        engine.release(slot, 1)


def test_a_sequence_that_is_still_to_be_copied_is_not_parked(engine: LlamaEngine, prompt: list[int]) -> None:
    opened(engine, 0, prompt, SAMPLED)
    assert engine.copy(CopyItem(0, 1, 2, 1, ROWS, SAMPLED, prompt[:ROWS]))
    assert not engine.park(2, 1)
    assert engine.park(0, 1)  # what is copied from is all there
    for slot in (0, 2):
        engine.release(slot, 1)


def test_a_parked_sequence_comes_back_where_something_was_still_to_be_copied_to(
    engine: LlamaEngine, prompt: list[int]
) -> None:
    expected = alone(engine, prompt[::-1], PENALISED)
    back = opened(engine, 1, prompt[::-1], PENALISED)
    assert engine.park(1, 1)
    opened(engine, 0, prompt, SAMPLED)
    assert engine.copy(CopyItem(0, 1, 2, 1, ROWS, SAMPLED, prompt[:ROWS]))
    engine.release(2, 1)
    assert engine.restore(1, 1, 2, 1)
    gone_on(engine, [2], len(prompt), [back])
    assert back == expected
    for slot in (0, 2):
        engine.release(slot, 1)


def alone_again(engine: LlamaEngine, prompt: list[int]) -> Trace:
    """The first token of a prompt in slot 0, which is released before and after."""
    engine.release(0, 1)
    trace = opened(engine, 0, prompt, SAMPLED)
    engine.release(0, 1)
    return trace


def test_kv_that_is_gone_is_not_copied(engine: LlamaEngine, prompt: list[int]) -> None:
    opened(engine, 0, prompt, SAMPLED)
    assert not engine.copy(CopyItem(0, 2, 1, 1, ROWS))
    assert not engine.copy(CopyItem(2, 1, 1, 1, ROWS))
    assert engine.prefill([PrefillItem(1, 1, ROWS, prompt[ROWS:], True)])[0].cache_miss
    engine.release(0, 1)
