"""When OpenMP's threads may spin long: the kernel's account of a thread, what is made of it, and who else has a say."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable

import pytest

from treadle_worker.llama import spinning
from treadle_worker.llama.crowd import Crowd, Waiting, waiting
from treadle_worker.llama.spinning import Spinning, adapted_spinning, prepare_spinning

CALM, CROWDED, UNDECIDED = Waiting(0.19, 0.01), Waiting(0.10, 0.10), Waiting(0.17, 0.03)
NOTHING = Waiting(0.0, 0.0)
LONG_CALM = 20  # looks of 0.2 s


def test_others_are_supposed_to_be_there_until_the_thread_ran_undisturbed_for_a_while() -> None:
    crowd = Crowd()
    assert crowd.here
    seen = [crowd.saw(CALM) for _ in range(LONG_CALM)]
    assert seen[0]
    assert not seen[-1]
    assert seen == sorted(seen, reverse=True), "it changed its mind"


def test_one_look_at_a_crowd_is_enough_and_a_calm_one_is_not() -> None:
    crowd = calm_crowd()
    assert crowd.saw(CROWDED)
    assert crowd.saw(CALM)


def test_what_is_neither_calm_nor_crowded_changes_nothing_but_starts_the_calm_anew() -> None:
    assert not calm_crowd().saw(UNDECIDED)
    crowd = Crowd()
    for _ in range(LONG_CALM):
        crowd.saw(CALM)
        crowd.saw(CALM)
        assert crowd.saw(UNDECIDED)


def test_a_thread_with_nothing_to_do_tells_nothing() -> None:
    crowd = Crowd()
    assert all(crowd.saw(NOTHING) for _ in range(100))
    assert not any(calm_crowd().saw(NOTHING) for _ in range(100))


def test_the_account_of_a_thread_grows_with_what_it_runs() -> None:
    before = waiting(threading.get_native_id())
    if before is None:
        pytest.skip("this kernel keeps no account")
    while time.thread_time() < 0.05:
        pass
    after = waiting(threading.get_native_id())
    assert after is not None
    assert after.since(before).ran_s > 0


def test_a_thread_that_is_not_there_has_no_account() -> None:
    assert waiting(-1) is None


def test_threads_sleep_soon_at_first_spin_long_when_calm_and_sleep_soon_again_in_a_crowd(account: Account) -> None:
    owned: list[int] = []
    spin = Spinning(lambda: owned.append(threading.get_native_id()))
    assert spin.short
    assert len(owned) == 1
    account.lately = CALM
    spin.working()
    until(lambda: not spin.short)
    account.lately = CROWDED
    until(lambda: spin.short)
    assert len(set(owned)) == len(owned) == 2, "one thread owned them twice, or too many did"


def test_an_idle_engine_is_not_watched_and_the_next_batch_is_seen(account: Account) -> None:
    spin = Spinning(lambda: None)
    spin.working()
    until(lambda: account.asked > 0)
    account.lately = NOTHING
    until(lambda: account.rests())
    account.lately = CALM
    spin.working()
    until(lambda: not spin.short)


def test_a_thread_that_ended_or_has_no_account_is_let_be(account: Account) -> None:
    spin = Spinning(lambda: None)
    account.lately = None
    spin.working()
    until(lambda: account.rests())
    assert spin.short


def test_saying_the_same_twice_changes_nothing() -> None:
    owned: list[int] = []
    spin = Spinning(lambda: owned.append(1))
    spin.shorten()
    assert len(owned) == 1
    spin.lengthen()
    spin.lengthen()
    assert not spin.short


@pytest.mark.parametrize("switch", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_the_operators_word_stands(switch: str, account: Account, unsaid: None) -> None:
    account.lately = None
    os.environ[switch] = "passive"
    prepare_spinning()
    assert os.environ[switch] == "passive"
    assert {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & set(os.environ) == {switch}
    assert adapted_spinning(LinkedToLibgomp()) is None  # type: ignore[arg-type]


def test_where_the_kernel_keeps_no_account_the_spin_is_moderate(account: Account, unsaid: None) -> None:
    prepare_spinning()
    assert "GOMP_SPINCOUNT" not in os.environ
    account.lately = None
    prepare_spinning()
    assert os.environ["GOMP_SPINCOUNT"] == "1000"


def test_without_libgomp_there_is_nothing_to_adapt(unsaid: None) -> None:
    assert adapted_spinning(ctypes.CDLL(None)) is None


class Account:
    """Stands for the kernel's account of every thread: what is lately done between two looks; None for no account."""

    def __init__(self) -> None:
        self.lately: Waiting | None = CALM
        self.asked = 0
        self._total = Waiting(0.0, 0.0)

    def __call__(self, _thread: int) -> Waiting | None:
        self.asked += 1
        lately = self.lately
        if lately is None:
            return None
        self._total = Waiting(self._total.ran_s + lately.ran_s, self._total.waited_s + lately.waited_s)
        return self._total

    def rests(self) -> bool:
        """Whether nobody asks any more."""
        before = self.asked
        time.sleep(0.05)
        return self.asked == before


class LinkedToLibgomp:
    """What a library looks like that was linked to libgomp."""

    def GOMP_parallel(self) -> None:
        """Never called here."""


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch) -> Account:
    account = Account()
    monkeypatch.setattr(spinning, "waiting", account)
    monkeypatch.setattr(spinning, "_PERIOD_S", 0.001)
    return account


@pytest.fixture
def unsaid(monkeypatch: pytest.MonkeyPatch) -> None:
    said = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    monkeypatch.setattr(os, "environ", {key: value for key, value in os.environ.items() if key not in said})


def calm_crowd() -> Crowd:
    crowd = Crowd()
    for _ in range(LONG_CALM):
        crowd.saw(CALM)
    assert not crowd.here
    return crowd


def until(seen: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not seen():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.002)
