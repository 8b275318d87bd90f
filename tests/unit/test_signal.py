"""Waking tasks that wait for a change, and knowing the process that a connection belongs to."""

from __future__ import annotations

import asyncio
import os

import pytest

from treadle._birthplace import Birthplace
from treadle._signal import Signal
from treadle.errors import ForkedClient


def test_everyone_who_waits_is_woken_once() -> None:
    async def main() -> None:
        signal, woken = Signal(), []

        async def wait(name: str) -> None:
            await signal.next()
            woken.append(name)

        tasks = [asyncio.create_task(wait(name)) for name in "ab"]
        await asyncio.sleep(0)
        signal.give()
        await asyncio.gather(*tasks)
        assert woken == ["a", "b"]
        signal.give()
        assert woken == ["a", "b"]

    asyncio.run(main())


def test_it_does_not_stay_set() -> None:
    async def main() -> None:
        signal = Signal()
        signal.give()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await signal.next()

    asyncio.run(main())


def test_those_who_gave_up_neither_break_it_nor_pile_up() -> None:
    async def main() -> None:
        signal = Signal()
        patient = [signal.next() for _ in range(3)]
        for _ in range(500):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0):
                    await signal.next()
        assert len(signal._waiting) < 30
        signal.give()
        await asyncio.gather(*patient)
        assert not signal._waiting

    asyncio.run(main())


def test_a_second_event_loop_is_refused_instead_of_waiting_for_ever() -> None:
    signal = Signal()

    async def main() -> None:
        signal.next()

    asyncio.run(main())
    with pytest.raises(RuntimeError, match="belongs to the event loop"):
        asyncio.run(main())


def test_one_that_is_cancelled_between_the_signal_and_its_turn_takes_nothing_from_others() -> None:
    async def main() -> None:
        signal = Signal()
        first = asyncio.ensure_future(signal.next())
        second = signal.next()
        first.cancel()
        signal.give()
        await second
        assert first.cancelled()

    asyncio.run(main())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # forking with threads is what is tested
def test_a_birthplace_is_another_process_after_a_fork_and_after_a_second_one() -> None:
    old = Birthplace()
    child = os.fork()
    if child == 0:
        new = Birthplace()
        grandchild = os.fork()
        if grandchild == 0:
            os._exit(_elsewhere(old) + _elsewhere(new))
        _, status = os.waitpid(grandchild, 0)
        os._exit(10 * _elsewhere(old) + os.waitstatus_to_exitcode(status) + 100 * _elsewhere(new))
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 12  # the old one twice, the child's own in the grandchild alone
    old.guard()
    assert old.here


def _elsewhere(birthplace: Birthplace) -> int:
    try:
        birthplace.guard()
    except ForkedClient:
        return 1
    return 0
