"""The lock of the in-process front: exclusive, reentrant, and in turn."""

from __future__ import annotations

import threading
import time

import pytest

from treadle_broker.turn_lock import TurnLock


def test_a_thread_that_takes_it_again_comes_after_the_one_that_waited() -> None:
    lock, entered = TurnLock(), threading.Event()

    def other() -> None:
        with lock:
            entered.set()

    for _ in range(20):
        entered.clear()
        thread = threading.Thread(target=other)
        with lock:
            thread.start()
            until = time.monotonic() + 30
            while not lock.contended:
                assert time.monotonic() < until
        with lock:
            assert entered.is_set()
        thread.join(30)
    assert not lock.contended


def test_two_threads_are_never_inside_at_once_and_both_finish() -> None:
    lock, inside, most = TurnLock(), [0], [0]

    def worker() -> None:
        for _ in range(2000):
            with lock, lock:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                inside[0] -= 1

    threads = [threading.Thread(target=worker) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    assert most == [1]


def test_an_error_inside_gives_it_up() -> None:
    lock = TurnLock()
    with pytest.raises(ValueError, match="inside"), lock:
        raise ValueError("inside")
    taken = threading.Event()

    def other() -> None:
        with lock:
            taken.set()

    thread = threading.Thread(target=other)
    thread.start()
    thread.join(10)
    assert taken.is_set()
