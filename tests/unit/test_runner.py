"""The tick runner: order inside a tick, what is skipped, and that it trusts no tick."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any

import pytest

from treadle_shared.engine import BatchEngine, DecodeItem, EngineFacts, PrefillItem, StepResult
from treadle_shared.errors import DecodeFailed
from treadle_shared.runner import TickRunner
from treadle_shared.sampling import SamplingParams
from treadle_shared.ticks import DecodeRow, PrefillRow, Tick, TickResult
from treadle_shared.tokens import pack_tokens

PARAMS = SamplingParams()
N_VOCAB = 1000
SLOTS = 4
CONTEXT = 16
EOG = 999


class SummingEngine:
    """The next token is the sum of the sequence so far (mod N_VOCAB), so it depends on that sequence alone.

    Keeps the order of its calls; can be told to fail, or to have lost a sequence.
    """

    def __init__(self) -> None:
        self.sequences: dict[tuple[int | str, int], list[int]] = {}
        self.calls: list[str] = []
        self.fail_on = ""
        self.last_timings = (0.25, 0.125)

    recipe_fingerprint = "summing"
    facts = EngineFacts(
        recipe_fingerprint="summing",
        n_vocab=N_VOCAB,
        context_tokens=CONTEXT,
        max_sequences=SLOTS,
        kv_bytes_per_token=1,
        weight_bytes=0,
    )

    def prefill(self, items: Sequence[PrefillItem]) -> list[StepResult]:
        self._called("prefill", items)
        results = []
        for item in items:
            sequence = self.sequences.setdefault((item.session, item.epoch), [])
            assert len(sequence) == item.start
            sequence += item.tokens
            results.append(self._sampled(item, sequence) if item.sample else StepResult(item.session, item.epoch))
        return results

    def decode_batch(self, items: Sequence[DecodeItem]) -> list[StepResult]:
        self._called("decode", items)
        return [self._decoded(item) for item in items]

    def release(self, session: int | str, epoch: int) -> None:
        self.calls.append(f"release {session}.{epoch}")
        self.sequences.pop((session, epoch), None)

    @property
    def kv_tokens(self) -> int:
        return sum(map(len, self.sequences.values()))

    def _decoded(self, item: DecodeItem) -> StepResult:
        sequence = self.sequences.get((item.session, item.epoch))
        if sequence is None:
            return StepResult(item.session, item.epoch, cache_miss=True)
        assert len(sequence) == item.pos
        sequence.append(sum(sequence) % N_VOCAB if item.token is None else item.token)
        return self._sampled(item, sequence) if item.sample else StepResult(item.session, item.epoch)

    def _sampled(self, item: PrefillItem | DecodeItem, sequence: list[int]) -> StepResult:
        token = sum(sequence) % N_VOCAB
        return StepResult(item.session, item.epoch, token, eog=token == EOG)

    def _called(self, name: str, items: Sequence[PrefillItem] | Sequence[DecodeItem]) -> None:
        self.calls.append(f"{name} " + " ".join(f"{item.session}.{item.epoch}" for item in items))
        if self.fail_on == name:
            self.fail_on = ""
            raise DecodeFailed(-3, "told to fail")


class Node:
    """A runner over a SummingEngine, with ticks numbered by themselves."""

    def __init__(self, clock: Callable[[], float] = lambda: 0.0) -> None:
        self.engine = SummingEngine()
        self.runner = TickRunner(self.engine, clock)
        self._next_tick = count(1)

    def run(
        self,
        decode: Iterable[DecodeRow] = (),
        prefill: Iterable[PrefillRow] = (),
        release: Iterable[int] = (),
        resync: bool = False,
    ) -> list[TickResult]:
        tick = Tick(
            broker_id="b",
            worker_id="w",
            tick_id=next(self._next_tick),
            decode=list(decode),
            prefill=list(prefill),
            release=list(release),
            resync=resync,
        )
        results = list(self.runner.run(tick))
        self.runner.check()
        assert [result.last for result in results] == [False] * (len(results) - 1) + [True]
        assert {(result.broker_id, result.worker_id, result.tick_id) for result in results} == {
            ("b", "w", tick.tick_id)
        }
        return results

    def refused(self, **tick: Any) -> TickResult:
        """The refusal of a tick that must change nothing in the engine and call nothing of it."""
        before = {key: list(sequence) for key, sequence in self.engine.sequences.items()}
        calls = len(self.engine.calls)
        (result,) = self.run(**tick)
        assert self.engine.sequences == before
        assert len(self.engine.calls) == calls
        assert result.not_run
        assert result.rows == []
        return result


def chunk(slot: int, gen: int, tokens: Sequence[int], start: int = 0, sample: bool = True) -> PrefillRow:
    return PrefillRow(slot, gen, start, pack_tokens(tokens), sample, 0, PARAMS if start == 0 else None)


def rows(results: list[TickResult]) -> list[tuple[int, int, int]]:
    return [(row.slot, row.gen, row.token) for result in results for row in result.rows]


@pytest.fixture
def node() -> Node:
    """Slots 0 and 1 hold sequences of three and two rows."""
    node = Node()
    assert rows(node.run(prefill=[chunk(0, 1, [1, 2, 3]), chunk(1, 1, [10, 20])])) == [(0, 1, 6), (1, 1, 30)]
    node.engine.calls.clear()
    return node


def test_the_fake_is_an_engine() -> None:
    assert isinstance(SummingEngine(), BatchEngine)


# ---- a tick's course


def test_a_tick_releases_then_decodes_then_prefills(node: Node) -> None:
    results = node.run(decode=[DecodeRow(0, 1, 3)], prefill=[chunk(1, 2, [5])], release=[1])
    assert node.engine.calls == ["release 1.1", "decode 0.1", "prefill 1.2"]
    assert [(result.part, rows([result])) for result in results] == [(0, [(0, 1, 12)]), (1, [(1, 2, 5)])]


def test_the_decode_part_leaves_before_prefill_runs(node: Node) -> None:
    tick = Tick(broker_id="b", worker_id="w", tick_id=9, decode=[DecodeRow(0, 1, 3)], prefill=[chunk(2, 1, [5])])
    parts = node.runner.run(tick)
    assert next(parts).part == 0
    assert node.engine.calls == ["decode 0.1"]
    assert next(parts).part == 1


@pytest.mark.parametrize(
    ("decode", "prefill", "parts"),
    [([], [], [0]), ([DecodeRow(0, 1, 3)], [], [0]), ([], [chunk(2, 1, [5])], [1])],
)
def test_a_tick_is_answered_by_the_parts_it_has(
    node: Node, decode: list[DecodeRow], prefill: list[PrefillRow], parts: list[int]
) -> None:
    assert [result.part for result in node.run(decode, prefill)] == parts


def test_sampled_tokens_are_fed_back_without_the_broker(node: Node) -> None:
    tokens = [rows(node.run(decode=[DecodeRow(0, 1, pos)]))[0][2] for pos in (3, 4, 5)]
    assert tokens == [12, 24, 48]
    assert node.engine.sequences[0, 1] == [1, 2, 3, 6, 12, 24]


def test_a_forced_token_replaces_the_sampled_one(node: Node) -> None:
    assert rows(node.run(decode=[DecodeRow(0, 1, 3, token=100)])) == [(0, 1, 106)]


def test_a_row_that_asks_for_no_token_yields_none(node: Node) -> None:
    assert rows(node.run(decode=[DecodeRow(0, 1, 3, token=7, sample=False)])) == [(0, 1, -1)]
    assert rows(node.run(prefill=[chunk(2, 1, [5, 6], sample=False)])) == [(2, 1, -1)]
    assert rows(node.run(prefill=[chunk(2, 1, [7], start=2)])) == [(2, 1, 18)]


def test_results_tell_rows_held_and_time_spent() -> None:
    ticking = count()
    node = Node(clock=lambda: float(next(ticking)))
    (result,) = node.run(prefill=[chunk(0, 1, [1, 2, 3])])
    assert result.kv_tokens == 3
    assert (result.timings.engine_s, result.timings.sample_s, result.timings.total_s) == (0.25, 0.125, 1.0)


def test_a_released_slot_is_free_for_the_next_generation(node: Node) -> None:
    node.run(release=[0, 1])
    assert node.engine.kv_tokens == 0
    assert rows(node.run(prefill=[chunk(0, 2, [4])])) == [(0, 2, 4)]


def test_releasing_an_empty_slot_is_no_error(node: Node) -> None:
    (result,) = node.run(release=[3])
    assert not result.not_run
    assert node.engine.calls == []


def test_reset_empties_every_slot_and_forgets_failures(node: Node) -> None:
    node.refused(decode=[DecodeRow(3, 1, 1)])
    node.runner.reset()
    assert node.engine.kv_tokens == 0
    assert rows(node.run(prefill=[chunk(0, 1, [4])])) == [(0, 1, 4)]


# ---- sequences that have ended


def test_rows_after_the_end_of_generation_are_skipped_and_said_so() -> None:
    node = Node()
    (first,) = node.run(prefill=[chunk(0, 1, [900, 99]), chunk(1, 1, [1])])
    assert [row.eog for row in first.rows] == [True, False]
    (second,) = node.run(decode=[DecodeRow(0, 1, 2), DecodeRow(1, 1, 1)])
    assert second.skipped == [(0, 1)]
    assert rows([second]) == [(1, 1, 2)]
    assert node.engine.calls[-1] == "decode 1.1"
    (third,) = node.run(decode=[DecodeRow(0, 1, 3)])
    assert (third.skipped, third.rows) == ([(0, 1)], [])
    assert node.engine.calls[-1] == "decode 1.1"


def test_a_chunk_after_the_end_of_generation_is_skipped() -> None:
    node = Node()
    node.run(prefill=[chunk(0, 1, [900, 99])])
    (result,) = node.run(prefill=[chunk(0, 1, [5], start=2)])
    assert (result.part, result.skipped, result.rows) == (0, [(0, 1)], [])


def test_a_lost_sequence_is_reported_once_and_then_skipped(node: Node) -> None:
    del node.engine.sequences[0, 1]
    (first,) = node.run(decode=[DecodeRow(0, 1, 3), DecodeRow(1, 1, 2)])
    assert [(row.slot, row.token, row.miss) for row in first.rows] == [(0, -1, True), (1, 60, False)]
    (second,) = node.run(decode=[DecodeRow(0, 1, 4), DecodeRow(1, 1, 3)])
    assert second.skipped == [(0, 1)]
    assert rows([second]) == [(1, 1, 120)]


# ---- ticks that contradict the engine

INVALID = {
    "a slot the engine does not have": {"decode": [DecodeRow(SLOTS, 1, 1)]},
    "an empty slot": {"decode": [DecodeRow(2, 1, 1)]},
    "another generation": {"decode": [DecodeRow(0, 2, 3)]},
    "a position ahead": {"decode": [DecodeRow(0, 1, 4)]},
    "a position behind": {"decode": [DecodeRow(0, 1, 2)]},
    "a decode as first row": {"decode": [DecodeRow(0, 1, 0)]},
    "a forced token outside the vocabulary": {"decode": [DecodeRow(0, 1, 3, token=N_VOCAB)]},
    "two rows for a slot": {"decode": [DecodeRow(0, 1, 3), DecodeRow(0, 1, 4)]},
    "a row and a chunk for a slot": {"decode": [DecodeRow(0, 1, 3)], "prefill": [chunk(0, 1, [1], start=4)]},
    "a row for a slot released in the same tick": {"decode": [DecodeRow(0, 1, 3)], "release": [0]},
    "a chunk that goes on in a slot released in the same tick": {
        "prefill": [chunk(0, 1, [1], start=3)],
        "release": [0],
    },
    "a chunk of no tokens": {"prefill": [chunk(2, 1, [])]},
    "a chunk with a token outside the vocabulary": {"prefill": [chunk(2, 1, [1, N_VOCAB])]},
    "a chunk with a negative token": {"prefill": [chunk(2, 1, [1, -1])]},
    "a chunk of half a token": {"prefill": [PrefillRow(2, 1, 0, b"\x01\x00", True, 0, PARAMS)]},
    "a first chunk in an occupied slot": {"prefill": [chunk(0, 2, [1])]},
    "a first chunk without parameters": {"prefill": [PrefillRow(2, 1, 0, pack_tokens([1]), True)]},
    "a later chunk in an empty slot": {"prefill": [chunk(2, 1, [1], start=1)]},
    "a later chunk at another position": {"prefill": [chunk(0, 1, [1], start=2)]},
    "a later chunk of another generation": {"prefill": [chunk(0, 2, [1], start=3)]},
    "a prompt longer than the context": {"prefill": [chunk(2, 1, [1] * (CONTEXT + 1))]},
    "a later chunk beyond the context": {"prefill": [chunk(0, 1, [1] * (CONTEXT - 2), start=3)]},
}


@pytest.mark.parametrize("tick", INVALID.values(), ids=INVALID.keys())
def test_an_invalid_tick_changes_nothing(node: Node, tick: dict[str, Any]) -> None:
    result = node.refused(**tick)
    assert result.error_code != 0
    assert result.error


@pytest.mark.parametrize("tick", INVALID.values(), ids=INVALID.keys())
def test_the_valid_rows_beside_an_invalid_one_are_not_run_either(node: Node, tick: dict[str, Any]) -> None:
    beside = [DecodeRow(1, 1, 2), *tick.get("decode", [])]
    node.refused(**tick | {"decode": beside, "release": [3, *tick.get("release", [])]})


def test_after_an_invalid_tick_nothing_runs_until_resync(node: Node) -> None:
    assert node.refused(decode=[DecodeRow(0, 1, 9)]).error_code == -1
    for _ in range(2):
        assert node.refused(decode=[DecodeRow(0, 1, 3)]).error_code == 0
    assert node.refused(release=[0]).error_code == 0
    assert rows(node.run(decode=[DecodeRow(0, 1, 3)], resync=True)) == [(0, 1, 12)]
    assert rows(node.run(decode=[DecodeRow(0, 1, 4)])) == [(0, 1, 24)]


def test_a_resync_tick_is_checked_like_any_other(node: Node) -> None:
    node.refused(decode=[DecodeRow(0, 1, 9)])
    assert node.refused(decode=[DecodeRow(0, 1, 9)], resync=True).error_code != 0
    assert node.refused(decode=[DecodeRow(0, 1, 3)]).error_code == 0


def test_the_context_can_be_filled_to_its_last_token(node: Node) -> None:
    node.run(prefill=[chunk(2, 1, [1] * (CONTEXT - 1))])
    node.run(decode=[DecodeRow(2, 1, CONTEXT - 1)])
    assert "do not fit" in node.refused(decode=[DecodeRow(2, 1, CONTEXT)]).error


# ---- batches that fail


def test_a_failed_decode_ends_the_tick_before_prefill(node: Node) -> None:
    node.engine.fail_on = "decode"
    (result,) = node.run(decode=[DecodeRow(0, 1, 3)], prefill=[chunk(2, 1, [5])])
    assert (result.part, result.last, result.not_run, result.error_code) == (0, True, False, -3)
    assert "told to fail" in result.error
    assert result.rows == []
    assert node.engine.calls == ["decode 0.1"]
    assert node.refused(decode=[DecodeRow(1, 1, 2)]).error_code == 0


def test_a_failed_prefill_keeps_the_tokens_of_the_decode_part(node: Node) -> None:
    node.engine.fail_on = "prefill"
    first, second = node.run(decode=[DecodeRow(0, 1, 3)], prefill=[chunk(2, 1, [5])])
    assert (rows([first]), first.error) == ([(0, 1, 12)], "")
    assert (second.part, second.rows, second.error_code) == (1, [], -3)
    assert node.refused(decode=[DecodeRow(0, 1, 4)]).error_code == 0


@pytest.mark.parametrize("part", ["decode", "prefill"])
def test_after_a_failure_a_resync_tick_starts_the_slots_anew(node: Node, part: str) -> None:
    node.engine.fail_on = part
    node.run(decode=[DecodeRow(0, 1, 3)], prefill=[chunk(2, 1, [5])])
    results = node.run(prefill=[chunk(0, 2, [1, 2, 3]), chunk(2, 2, [5])], release=[0, 2], resync=True)
    assert rows(results) == [(0, 2, 6), (2, 2, 5)]
    assert rows(node.run(decode=[DecodeRow(0, 2, 3), DecodeRow(1, 1, 2)])) == [(0, 2, 12), (1, 1, 60)]


def test_an_unexpected_error_of_the_engine_is_not_hidden(node: Node) -> None:
    del node.engine.sequences[0, 1][:]
    with pytest.raises(AssertionError):
        node.run(decode=[DecodeRow(0, 1, 3)])


def test_rows_that_no_slot_accounts_for_are_noticed(node: Node) -> None:
    node.engine.sequences[3, 9] = [1, 2]
    with pytest.raises(AssertionError, match="holds 7 rows"):
        node.runner.check()
