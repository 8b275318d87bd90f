"""When OpenMP's threads may spin long: the kernel's account of a thread, what is made of it, and who else has a say."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from treadle_worker.llama import crowd as crowd_module
from treadle_worker.llama import spinning
from treadle_worker.llama.crowd import Crowd, Waiting, waiting
from treadle_worker.llama.spinning import Spinning, adapted_spinning, prepared_spinning

CALM, CROWDED, UNDECIDED = Waiting(0.19, 0.01), Waiting(0.10, 0.10), Waiting(0.17, 0.03)
NOTHING = Waiting(0.0, 0.0)
LONG_CALM = 20  # looks of 0.2 s
FIRST_CALM = 3


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


def test_calm_comes_soon_at_first_and_late_after_a_crowd() -> None:
    fresh, warned = Crowd(), Crowd()
    warned.saw(CROWDED)
    for _ in range(FIRST_CALM):
        fresh.saw(CALM)
        warned.saw(CALM)
    assert not fresh.here
    assert warned.here


def test_what_is_neither_calm_nor_crowded_changes_nothing_but_starts_the_calm_anew() -> None:
    assert not calm_crowd().saw(UNDECIDED)
    crowd = Crowd()
    crowd.saw(CROWDED)
    for _ in range(LONG_CALM):
        crowd.saw(CALM)
        crowd.saw(CALM)
        assert crowd.saw(UNDECIDED)


@pytest.mark.parametrize(("waited_s", "crowded"), [(0.024, False), (0.026, True)])
def test_a_quarter_of_the_time_is_a_crowd(waited_s: float, crowded: bool) -> None:
    assert calm_crowd().saw(Waiting(0.1 - waited_s, waited_s)) is crowded


@pytest.mark.parametrize("little", [NOTHING, Waiting(0.0, 0.019)])
def test_a_thread_with_next_to_nothing_to_do_tells_nothing(little: Waiting) -> None:
    crowd = Crowd()
    assert all(crowd.saw(little) for _ in range(1000))
    assert not any(calm_crowd().saw(little) for _ in range(1000))


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


@pytest.mark.parametrize("line", ["0 0 0\n", "", "1 2\n", "kept 0 0\n"])
def test_an_account_that_is_not_kept_is_none(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "schedstat").write_text(line)
    monkeypatch.setattr(crowd_module, "_TASKS", tmp_path)
    assert waiting(7) is None


def test_threads_sleep_soon_at_first_spin_long_when_calm_and_sleep_soon_again_in_a_crowd(account: Account) -> None:
    owned: list[int] = []
    spin = Spinning(lambda: owned.append(threading.get_native_id()))
    assert spin.short
    assert len(owned) == 1
    account.lately = CALM
    work(spin)
    until(lambda: not spin.short)
    account.lately = CROWDED
    until(lambda: spin.short)
    assert len(set(owned)) == len(owned) == 2, "one thread owned them twice, or too many did"


def test_an_idle_engine_is_not_watched_and_the_next_batch_is_seen(account: Account) -> None:
    spin = Spinning(lambda: None)
    account.lately = UNDECIDED
    work(spin)
    until(lambda: account.asked > 0)
    account.lately = NOTHING
    until(lambda: account.rests())
    assert spin.short
    account.lately = CALM
    work(spin)
    until(lambda: not spin.short)


def test_a_thread_that_ended_or_has_no_account_is_let_be(account: Account) -> None:
    spin = Spinning(lambda: None)
    account.lately = None
    work(spin)
    until(lambda: account.rests())
    assert spin.short


def test_a_batch_that_begins_while_the_watch_goes_to_rest_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Spinning, "_watch", lambda self: None)
    spin = Spinning(lambda: None)
    spin.working()
    spin.working()
    spin._rest(1)  # it had seen one of the two
    assert spin._busy.is_set()
    spin._rest(2)
    assert not spin._busy.is_set()


def test_saying_the_same_twice_changes_nothing_and_who_owned_the_threads_ends() -> None:
    owners: list[threading.Thread] = []
    spin = Spinning(lambda: owners.append(threading.current_thread()))
    spin.shorten()
    (owner,) = owners
    assert owner.is_alive()
    spin.lengthen()
    spin.lengthen()
    assert not spin.short
    assert not owner.is_alive()


def test_where_no_thread_is_to_be_had_they_go_on_spinning(monkeypatch: pytest.MonkeyPatch) -> None:
    spin = Spinning(lambda: None)
    spin.lengthen()

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    spin.shorten()
    assert not spin.short
    monkeypatch.undo()
    spin.shorten()
    assert spin.short


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_cannot_own_threads_hangs_nobody() -> None:
    def fail() -> None:
        raise OSError("no threads")

    spin = Spinning(fail)
    spin.lengthen()
    assert not spin.short


@pytest.mark.parametrize("switch", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
@pytest.mark.parametrize("seen", [True, False])
def test_the_operators_word_stands(switch: str, seen: bool, account: Account, environ: dict[str, str]) -> None:
    account.lately = CALM if seen else None
    environ[switch] = "passive"
    with prepared_spinning() as adapts:
        assert not adapts
        assert environ == {switch: "passive"}
    assert environ == {switch: "passive"}


@pytest.mark.parametrize("switch", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_an_empty_word_is_none(switch: str, account: Account, environ: dict[str, str]) -> None:
    environ[switch] = ""
    with prepared_spinning() as adapts:
        assert adapts
        assert environ == {"GOMP_SPINCOUNT": "300000", "OMP_WAIT_POLICY": "active"}
    assert environ == {switch: ""}


def test_a_thread_that_has_just_begun_finds_what_the_first_one_finds(environ: dict[str, str]) -> None:
    """The kernel's account of a new thread is empty now and then."""

    def prepare() -> bool:
        with prepared_spinning() as adapts:
            return adapts

    found = []
    for _ in range(300):
        thread = threading.Thread(target=lambda: found.append(prepare()))
        thread.start()
        thread.join()
    assert found == [prepare()] * 300


def test_where_the_kernel_keeps_no_account_the_spin_is_moderate(account: Account, environ: dict[str, str]) -> None:
    account.lately = None
    with prepared_spinning() as adapts:
        assert not adapts
        assert environ == {"GOMP_SPINCOUNT": "1000"}
    assert environ == {}


@pytest.mark.parametrize(("threads", "processors", "owned"), [(2, 2, 2), (4, 2, 2), (2, 8, 8), (8, 8, 2)])
def test_one_thread_more_than_there_are_processors_is_owned(threads: int, processors: int, owned: int) -> None:
    """The process's first thread counts, the master of a batch once, and the owner with its batch's others."""
    library = LinkedToLibgomp()
    assert adapted_spinning(library, threads, processors) is not None  # type: ignore[arg-type]
    assert library.GOMP_parallel.owned == [owned]
    assert 1 + (threads - 1) + (owned - 1) > processors


def test_where_a_batch_has_one_thread_nobody_waits() -> None:
    assert adapted_spinning(LinkedToLibgomp(), 1, 2) is None  # type: ignore[arg-type]


def test_without_libgomp_there_is_nothing_to_adapt() -> None:
    assert adapted_spinning(ctypes.CDLL(None), 2, 2) is None
    assert adapted_spinning(LinkedToLlvms(), 2, 2) is None  # type: ignore[arg-type]


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


class Region:
    """Stands for libgomp's entry, and keeps how large the teams are that it was asked for."""

    def __init__(self) -> None:
        self.owned: list[int] = []

    def __call__(self, _function: ctypes.c_void_p, _data: None, threads: int, _flags: int) -> None:
        self.owned.append(threads)


class LinkedToLibgomp:
    """What a library looks like that was linked to libgomp."""

    def __init__(self) -> None:
        self.GOMP_parallel = Region()


class LinkedToLlvms(LinkedToLibgomp):
    """LLVM's OpenMP has GCC's entries too, and waits by rules of its own."""


setattr(LinkedToLlvms, "__kmpc_fork_call", None)  # a class would make its own name of it


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch) -> Account:
    account = Account()
    monkeypatch.setattr(spinning, "waiting", account)
    monkeypatch.setattr(spinning, "_PERIOD_S", 0.001)
    return account


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment, which says nothing."""
    environ: dict[str, str] = {}
    monkeypatch.setattr(spinning, "os", SimpleNamespace(environ=environ, getpid=os.getpid))
    return environ


def calm_crowd() -> Crowd:
    crowd = Crowd()
    for _ in range(LONG_CALM):
        crowd.saw(CALM)
    assert not crowd.here
    return crowd


def work(spin: Spinning) -> None:
    """Say so in a thread that ends, so that nothing is watched when the test is over."""
    worker = threading.Thread(target=spin.working)
    worker.start()
    worker.join()


def until(seen: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not seen():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.002)
