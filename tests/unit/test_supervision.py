"""When a child is started again, and what a telemetry subscriber has missed."""

from __future__ import annotations

import msgpack
import pytest

from treadle.supervise.restart import FIRST_DELAY_S, MAX_DELAY_S, MAX_FRUITLESS, RestartPolicy
from treadle.tail import Gap, Sequences, TelemetryEvent, parse, parse_replay


def test_the_wait_doubles_up_to_a_bound_and_then_a_person_has_to_look() -> None:
    policy = RestartPolicy()
    delays = [policy.died(1) for _ in range(MAX_FRUITLESS)]
    assert delays[:4] == [FIRST_DELAY_S, 2 * FIRST_DELAY_S, 4 * FIRST_DELAY_S, 8 * FIRST_DELAY_S]
    assert delays[-1] == MAX_DELAY_S
    assert policy.died(1) is None


def test_progress_begins_a_new_story() -> None:
    policy = RestartPolicy()
    for _ in range(10 * MAX_FRUITLESS):
        assert policy.died(-9) == FIRST_DELAY_S
        policy.progressed()


def test_a_child_that_starts_well_and_dies_by_what_it_is_asked_is_started_again_and_soon() -> None:
    policy = RestartPolicy()
    delays = []
    for _ in range(10 * MAX_FRUITLESS):
        delays.append(policy.died(-9))
        policy.lived()
    assert delays[:3] == [FIRST_DELAY_S, 2 * FIRST_DELAY_S, 4 * FIRST_DELAY_S]
    assert set(delays[3:]) == {4 * FIRST_DELAY_S}


def test_a_configuration_that_cannot_work_is_never_tried_again() -> None:
    policy = RestartPolicy()
    assert policy.died(78) is None


def _event(topic: str, sequence: int, boot: str = "b") -> TelemetryEvent:
    return TelemetryEvent(topic, sequence, {"boot_id": boot})


def test_the_first_event_of_a_topic_sets_its_place() -> None:
    sequences = Sequences()
    assert sequences.take(_event("tick", 40)) == (True, None)
    assert sequences.take(_event("session", 3)) == (True, None)
    assert sequences.take(_event("tick", 41)) == (True, None)


def test_a_jump_is_a_gap_of_its_topic() -> None:
    sequences = Sequences()
    sequences.take(_event("tick", 0))
    assert sequences.take(_event("tick", 5)) == (True, Gap("tick", 1, 4))
    assert sequences.take(_event("tick", 6)) == (True, None)


def test_a_last_value_sent_again_is_no_news() -> None:
    sequences = Sequences()
    sequences.take(_event("snapshot", 7))
    assert sequences.take(_event("snapshot", 7)) == (False, None)
    assert sequences.take(_event("snapshot", 8)) == (True, None)


def test_a_new_broker_counts_from_the_beginning() -> None:
    sequences = Sequences()
    sequences.take(_event("snapshot", 700))
    assert sequences.take(_event("snapshot", 0, boot="next")) == (True, None)


def _frames(topic: bytes = b"tick", sequence: int = 1) -> list[bytes]:
    return [topic, sequence.to_bytes(8, "big"), msgpack.packb({"boot_id": "b"})]


def test_an_event_is_read_from_its_three_frames() -> None:
    assert parse(_frames(sequence=300)) == TelemetryEvent("tick", 300, {"boot_id": "b"})
    replay = parse_replay([b"replay", *_frames(sequence=1), *_frames(sequence=2)])
    assert [(event.sequence, event.replayed) for event in replay] == [(1, True), (2, True)]
    assert parse_replay([b"replay"]) == []


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b"tick"],
        [*_frames(), b"more"],
        [b"tick", b"short", msgpack.packb({})],
        [b"tick", bytes(8), b"\xc1"],
        [b"tick", bytes(8), msgpack.packb([1])],
        [b"\xff", bytes(8), msgpack.packb({})],
    ],
)
def test_frames_that_are_no_event_are_passed_over(frames: list[bytes]) -> None:
    assert parse(frames) is None
