"""Copies in a tick: what the runner lets through, in which order they run, and that a wrong one changes nothing."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from treadle_shared.config import load_config
from treadle_shared.engine import BatchEngine, CopyingEngine, CopyItem
from treadle_shared.errors import DecodeFailed
from treadle_shared.runner import TickRunner
from treadle_shared.sampling import SamplingParams
from treadle_shared.ticks import CopyRow, DecodeRow, PrefillRow, Tick, TickResult
from treadle_shared.tokens import pack_tokens
from treadle_worker.reference import KvBatchEngine, build_reference_engine

PROMPT = [*range(40, 60)]
GREEDY = SamplingParams(ignore_eos=True)
PENALISED = SamplingParams(ignore_eos=True, repeat_penalty=1.5, penalty_last_n=12)


@pytest.fixture
def engine() -> KvBatchEngine:
    flags = {"engine": "reference", "max_sessions": 3, "session_tokens": 64, "cache_slots": 2}
    return build_reference_engine(load_config(environ={}, flags=flags))


def tick(number: int, **parts: Any) -> Tick:
    return Tick(broker_id="b", worker_id="w", tick_id=number, **parts)


def opening(slot: int, gen: int, tokens: list[int], params: SamplingParams = GREEDY, sample: bool = True) -> PrefillRow:
    return PrefillRow(slot, gen, 0, pack_tokens(tokens), sample, 0, params)


def further(slot: int, gen: int, start: int) -> PrefillRow:
    return PrefillRow(slot, gen, start, pack_tokens(PROMPT[start:]), True)


def kept(source: int, source_gen: int, slot: int, gen: int, rows: int) -> CopyRow:
    return CopyRow(source, source_gen, slot, gen, rows)


def copied(source: int, source_gen: int, slot: int, gen: int, rows: int, params: SamplingParams = GREEDY) -> CopyRow:
    return CopyRow(source, source_gen, slot, gen, rows, params, pack_tokens(PROMPT[max(rows - 12, 0) : rows]))


def run(runner: TickRunner, *ticks: Tick) -> list[TickResult]:
    return [part for one in ticks for part in runner.run(one)]


def tokens(runner: TickRunner, slot: int, gen: int, pos: int, first: int, count: int = 6) -> list[int]:
    """What a sequence goes on with."""
    found = [first]
    for step in range(count):
        (part,) = run(runner, tick(100 + step, decode=[DecodeRow(slot, gen, pos + step)]))
        found.append(part.rows[0].token)
    return found


def begun(engine: BatchEngine, rows: int = 20) -> TickRunner:
    """A runner whose slot 0 holds the prompt under generation 1."""
    runner = TickRunner(engine)
    run(runner, tick(1, prefill=[opening(0, 1, PROMPT[:rows])]))
    return runner


@pytest.mark.parametrize("params", [GREEDY, PENALISED])
def test_a_copied_beginning_goes_on_as_if_it_had_been_run(engine: KvBatchEngine, params: SamplingParams) -> None:
    alone = TickRunner(build_reference_engine(load_config(environ={}, flags={"engine": "reference"})))
    (part,) = run(alone, tick(1, prefill=[opening(0, 1, PROMPT, params)]))
    expected = tokens(alone, 0, 1, len(PROMPT), part.rows[0].token)
    assert isinstance(engine, CopyingEngine)
    runner = begun(engine)
    (part,) = run(runner, tick(2, copy=[copied(0, 1, 1, 2, 16, params)], prefill=[further(1, 2, 16)]))
    assert tokens(runner, 1, 2, len(PROMPT), part.rows[0].token) == expected
    runner.check()


def test_what_is_kept_outlives_its_source_and_can_be_copied_in_the_same_tick(engine: KvBatchEngine) -> None:
    runner = begun(engine)
    (part,) = run(
        runner,
        tick(2, keep=[kept(0, 1, 3, 2, 16)], release=[0], copy=[copied(3, 2, 0, 3, 16)], prefill=[further(0, 3, 16)]),
    )
    assert (part.error, part.kv_tokens) == ("", 16 + 20)
    assert engine.kv_tokens == 36


def test_what_was_kept_is_replaced_by_what_is_kept_there(engine: KvBatchEngine) -> None:
    runner = begun(engine)
    parts = run(runner, tick(2, keep=[kept(0, 1, 3, 2, 16)]), tick(3, keep=[kept(0, 1, 3, 4, 8)]))
    assert [part.kv_tokens for part in parts] == [36, 28]
    (refused,) = run(runner, tick(4, copy=[copied(3, 2, 1, 5, 8)], prefill=[further(1, 5, 8)]))
    assert refused.not_run


WRONG: dict[str, dict[str, Any]] = {
    "of a generation that is not there": {"copy": [copied(0, 7, 1, 2, 16)]},
    "of an empty slot": {"copy": [copied(2, 1, 1, 2, 16)]},
    "of more rows than there are": {"copy": [copied(0, 1, 1, 2, 21)]},
    "into a slot that is taken": {"copy": [copied(0, 1, 0, 2, 16)]},
    "of a slot that is released": {"release": [0], "copy": [copied(0, 1, 1, 2, 16)]},
    "beyond the engine": {"keep": [kept(0, 1, 5, 2, 16)]},
    "kept over a running sequence": {"keep": [kept(0, 1, 2, 2, 16)]},
    "twice into one slot": {"copy": [copied(0, 1, 1, 2, 16), copied(0, 1, 1, 3, 16)]},
    "without parameters": {"copy": [kept(0, 1, 1, 2, 16)]},
    "kept with parameters": {"keep": [copied(0, 1, 3, 2, 16)]},
    "of a token outside the vocabulary": {"copy": [CopyRow(0, 1, 1, 2, 16, GREEDY, pack_tokens([1 << 20]))]},
    "with a decode of what is kept": {"keep": [kept(0, 1, 3, 2, 16)], "decode": [DecodeRow(3, 2, 16)]},
    "with a prefill of what is kept": {"keep": [kept(0, 1, 3, 2, 16)], "prefill": [further(3, 2, 16)]},
    "with a prefill at another position": {"copy": [copied(0, 1, 1, 2, 16)], "prefill": [further(1, 2, 17)]},
    "with a sequence opened over it": {"copy": [copied(0, 1, 1, 2, 16)], "prefill": [opening(1, 3, [1])]},
}


@pytest.mark.parametrize("parts", WRONG.values(), ids=WRONG)
def test_a_wrong_copy_is_refused_and_changes_nothing(engine: KvBatchEngine, parts: dict[str, Any]) -> None:
    runner = begun(engine)
    run(runner, tick(2, prefill=[opening(2, 9, [1, 2])]))
    (part,) = run(runner, tick(3, **parts))
    assert (part.not_run, part.error_code, part.kv_tokens) == (True, -1, 22)
    (part,) = run(runner, tick(4, resync=True, decode=[DecodeRow(0, 1, 20), DecodeRow(2, 9, 2)]))
    assert [row.slot for row in part.rows] == [0, 2]


def test_an_engine_that_cannot_copy_is_not_asked_to(engine: KvBatchEngine) -> None:
    class Plain:
        """The same engine without the capability."""

        facts = msgspec.structs.replace(engine.facts, can_copy=False)

        def __getattr__(self, name: str) -> Any:
            return getattr(engine, name)

    runner = begun(Plain())  # type: ignore[arg-type]
    (part,) = run(runner, tick(2, copy=[copied(0, 1, 1, 2, 16)], prefill=[further(1, 2, 16)]))
    assert (part.not_run, part.error) == (True, "slot 1: the engine cannot copy sequences")


def test_a_copy_of_kv_that_is_gone_shows_as_a_miss_of_its_row(engine: KvBatchEngine) -> None:
    runner = begun(engine)
    engine.release(0, 1)  # behind the runner's back
    (part,) = run(
        runner,
        tick(2, keep=[kept(0, 1, 3, 2, 16)], copy=[copied(3, 2, 1, 3, 16)], prefill=[further(1, 3, 16)]),
    )
    assert [(row.slot, row.miss) for row in part.rows] == [(1, True)]
    assert part.kv_tokens == 0


def test_a_copy_of_a_sequence_that_missed_is_no_contradiction(engine: KvBatchEngine) -> None:
    runner = begun(engine, 8)
    engine.release(0, 1)
    run(runner, tick(2, prefill=[further(0, 1, 8)]))
    (part,) = run(runner, tick(3, copy=[copied(0, 1, 1, 3, 16)], prefill=[further(1, 3, 16)]))
    assert (part.error, part.rows[0].miss) == ("", True)


def test_a_copy_that_fails_is_a_miss_of_the_next_row(engine: KvBatchEngine) -> None:
    class Broken:
        """Copies fail."""

        def __getattr__(self, name: str) -> Any:
            return getattr(engine, name)

        def copy(self, item: CopyItem) -> bool:
            raise DecodeFailed(-100, "cannot be trimmed")

    runner = begun(Broken())  # type: ignore[arg-type]
    (part,) = run(runner, tick(2, copy=[copied(0, 1, 1, 2, 16)], prefill=[further(1, 2, 16)]))
    assert (part.not_run, part.error, part.rows[0].miss) == (False, "", True)
    (part,) = run(runner, tick(3, release=[1], prefill=[opening(1, 3, [5])]))
    assert (part.rows[0].slot, part.rows[0].miss) == (1, False)
