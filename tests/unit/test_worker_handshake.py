"""When a worker offers itself, whose ticks count, and when it gives up."""

from __future__ import annotations

import pytest

from treadle_worker.handshake import BUSY_LIMIT_S, HELLO_EVERY_S, UNHEARD_S, Handshake, Standing
from treadle_worker.throttle import Throttle


def test_hello_is_repeated_until_a_broker_answers() -> None:
    handshake = Handshake()
    assert handshake.hello_due(10.0)
    handshake.said_hello(10.0, heard=True)
    assert not handshake.hello_due(10.0 + 0.9 * HELLO_EVERY_S)
    assert handshake.hello_due(10.0 + HELLO_EVERY_S)
    handshake.welcomed("broker")
    assert not handshake.hello_due(1e9)
    assert handshake.next_hello is None
    assert handshake.serves("broker")


def test_hello_that_nobody_heard_is_said_again_soon() -> None:
    handshake = Handshake()
    handshake.said_hello(10.0, heard=False)
    assert handshake.next_hello == 10.0 + UNHEARD_S


def test_a_lost_broker_is_offered_the_worker_at_once() -> None:
    handshake = Handshake()
    handshake.said_hello(0.0, heard=True)
    handshake.welcomed("broker")
    assert handshake.lost(20.0)
    assert handshake.standing is Standing.OFFERING
    assert not handshake.serves("broker")
    assert handshake.hello_due(20.0)


def test_losing_nobody_changes_nothing() -> None:
    handshake = Handshake()
    handshake.said_hello(10.0, heard=True)
    assert not handshake.lost(10.1)
    assert not handshake.hello_due(10.1)


def test_a_busy_broker_is_asked_less_and_less_often() -> None:
    handshake = Handshake()
    waits = []
    for _ in range(5):
        handshake.busy(100.0)
        assert handshake.next_hello is not None
        waits.append(handshake.next_hello - 100.0)
    assert waits == sorted(waits)
    assert waits[0] > HELLO_EVERY_S
    assert waits[-1] == BUSY_LIMIT_S


def test_a_welcome_ends_the_back_off() -> None:
    handshake = Handshake()
    handshake.busy(0.0)
    handshake.welcomed("broker")
    handshake.lost(50.0)
    handshake.said_hello(50.0, heard=True)
    assert handshake.next_hello == 50.0 + HELLO_EVERY_S


@pytest.mark.parametrize(
    ("reason", "code"), [("version", 1), ("recipe", 1), ("tokenizer", 78), ("busy", None), ("unknown", None)]
)
def test_only_refusals_that_no_retry_can_change_end_the_process(reason: str, code: int | None) -> None:
    assert Handshake().exit_code(reason) == code


def test_a_flood_is_told_once_a_period_and_counted_whole() -> None:
    throttle = Throttle(1.0)
    assert throttle.due(0.0) == 0
    for _ in range(3):
        throttle.count()
    assert throttle.due(5.0) == 3
    throttle.count()
    assert throttle.due(5.5) == 0
    assert throttle.due(6.0) == 1
    assert throttle.total == 4
