"""The runner's parking lot: what it moves, in which order, and what it refuses without moving anything."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from test_runner import SLOTS, SummingEngine

from treadle_shared.engine import ParkingEngine
from treadle_shared.runner import TickRunner
from treadle_shared.sampling import SamplingParams
from treadle_shared.ticks import DecodeRow, PrefillRow, RestoreRow, Tick, TickResult
from treadle_shared.tokens import pack_tokens


class ParkingSummingEngine(SummingEngine):
    """One that can park, and can be told that it cannot."""

    facts = msgspec.structs.replace(SummingEngine.facts, parked_bytes_per_token=3)

    def __init__(self) -> None:
        super().__init__()
        self.parked: dict[tuple[int | str, int], list[int]] = {}
        self.full = False
        self.lost = False

    def park(self, session: int | str, epoch: int) -> bool:
        self.calls.append(f"park {session}.{epoch}")
        if self.full:
            return False
        self.parked[session, epoch] = self.sequences.pop((session, epoch))
        return True

    def restore(self, session: int | str, epoch: int, new_session: int | str, new_epoch: int) -> bool:
        self.calls.append(f"restore {session}.{epoch} as {new_session}.{new_epoch}")
        sequence = self.parked.pop((session, epoch))
        if not self.lost:
            self.sequences[new_session, new_epoch] = sequence
        return not self.lost

    def release(self, session: int | str, epoch: int) -> None:
        super().release(session, epoch)
        self.parked.pop((session, epoch), None)

    @property
    def parked_bytes(self) -> int:
        return 3 * sum(map(len, self.parked.values()))


class Node:
    """A runner with sequences of the given prompts in slots 0, 1, ..., under generations 10, 11, ..."""

    def __init__(self, prompts: Iterable[list[int]], engine: SummingEngine | None = None) -> None:
        self.engine = engine or ParkingSummingEngine()
        self.runner = TickRunner(self.engine, lambda: 0.0)
        self._ticks = 0
        rows = [
            PrefillRow(slot, 10 + slot, 0, pack_tokens(tokens), True, 0, SamplingParams())
            for slot, tokens in enumerate(prompts)
        ]
        self.run(prefill=rows)
        self.engine.calls.clear()

    def run(self, **parts: Any) -> list[TickResult]:
        self._ticks += 1
        return list(self.runner.run(Tick(broker_id="b", worker_id="w", tick_id=self._ticks, **parts)))


def test_the_engine_of_this_test_is_one_that_parks() -> None:
    assert isinstance(ParkingSummingEngine(), ParkingEngine)
    assert not isinstance(SummingEngine(), ParkingEngine)


def test_a_tick_parks_then_releases_then_restores_then_runs() -> None:
    node = Node([[1, 2, 3], [4]])
    node.run(park=[(0, 10)], release=[0])
    node.engine.calls.clear()
    (result,) = node.run(park=[(1, 11)], release=[1], restore=[RestoreRow(1, 10, 20)], decode=[DecodeRow(1, 20, 3)])
    assert node.engine.calls == ["park 1.11", "restore 0.10 as 1.20", "decode 1.20"]
    assert (result.kv_tokens, result.parked_bytes) == (4, 3)
    assert result.rows[0].gen == 20
    node.runner.check()


def test_a_parked_sequence_goes_on_with_its_own_token() -> None:
    alone, turned = Node([[1, 2, 3]]), Node([[1, 2, 3]])
    expected = alone.run(decode=[DecodeRow(0, 10, 3)])[0].rows[0].token
    turned.run(park=[(0, 10)], release=[0])
    (result,) = turned.run(restore=[RestoreRow(2, 10, 30)], decode=[DecodeRow(2, 30, 3)])
    assert result.rows[0].token == expected


def test_a_sequence_that_had_ended_is_released_instead() -> None:
    node = Node([[1, 2]])
    node.runner._slots[0].ended = True
    (result,) = node.run(park=[(0, 10)], release=[0])
    assert (result.unparked, result.kv_tokens, result.parked_bytes) == ([10], 0, 0)
    assert node.engine.calls == ["release 0.10"]


def test_a_sequence_that_cannot_be_saved_is_released_and_named_in_the_first_part_alone() -> None:
    node = Node([[1, 2], [3]])
    node.engine.full = True
    first, second = node.run(
        park=[(0, 10)],
        release=[0],
        decode=[DecodeRow(1, 11, 1)],
        prefill=[PrefillRow(0, 12, 0, pack_tokens([5]), True, 0, SamplingParams())],
    )
    assert (first.unparked, second.unparked) == ([10], [])
    assert not node.engine.parked


def test_a_state_that_is_lost_is_a_miss_of_its_row() -> None:
    node = Node([[1, 2]])
    node.run(park=[(0, 10)], release=[0])
    node.engine.lost = True
    (result,) = node.run(restore=[RestoreRow(0, 10, 11)], decode=[DecodeRow(0, 11, 2)])
    assert result.rows[0].miss
    assert result.parked_bytes == 0


def test_what_is_discarded_or_reset_is_forgotten_by_the_engine() -> None:
    node = Node([[1, 2], [3]])
    node.run(park=[(0, 10), (1, 11)], release=[0, 1])
    (result,) = node.run(discard=[10, 99])
    assert result.parked_bytes == 3
    node.runner.reset()
    assert not node.engine.parked


@pytest.mark.parametrize(
    "parts",
    [
        {"park": [(0, 99)], "release": [0]},
        {"park": [(3, 10)], "release": [3]},
        {"park": [(0, 10)]},
        {"park": [(0, 10), (0, 10)], "release": [0]},
        {"park": [(0, 10)], "release": [0], "decode": [DecodeRow(0, 10, 2)]},
        {"restore": [RestoreRow(2, 98, 30)]},
        {"restore": [RestoreRow(0, 11, 30)]},
        {"restore": [RestoreRow(SLOTS, 11, 30)]},
        {"restore": [RestoreRow(2, 11, 30), RestoreRow(3, 11, 31)]},
        {"restore": [RestoreRow(2, 11, 30)], "discard": [11]},
        {"restore": [RestoreRow(2, 11, 30)], "decode": [DecodeRow(2, 29, 1)]},
        {"restore": [RestoreRow(2, 11, 30)], "decode": [DecodeRow(2, 30, 2)]},
        {
            "restore": [RestoreRow(2, 11, 30)],
            "prefill": [PrefillRow(2, 31, 0, pack_tokens([1]), True, 0, SamplingParams())],
        },
    ],
)
def test_a_move_that_contradicts_what_is_there_changes_nothing(parts: dict[str, Any]) -> None:
    node = Node([[1, 2], [3]])
    node.run(park=[(1, 11)], release=[1])
    node.engine.calls.clear()
    (result,) = node.run(**parts)
    assert result.not_run
    assert (result.kv_tokens, result.parked_bytes) == (2, 3)
    assert node.engine.calls == []
    (result,) = node.run(resync=True, restore=[RestoreRow(1, 11, 40)], decode=[DecodeRow(0, 10, 2)])
    assert not result.error


def test_an_engine_that_cannot_park_is_never_asked_to() -> None:
    node = Node([[1, 2]], SummingEngine())
    (result,) = node.run(park=[(0, 10)], release=[0])
    assert result.not_run
    assert result.error == "this engine cannot park"
