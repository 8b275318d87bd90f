"""How long OpenMP's threads look at a barrier before they sleep."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import Final

import structlog

from treadle_shared.log import get_logger
from treadle_worker.llama.crowd import Crowd, waiting

_PERIOD_S: Final = 0.2  # a spinning batch beside another one may take seconds; no longer than this goes by unseen

_SPINS, _POLICY = "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"

_ADAPTED: Final = {_SPINS: "300000", _POLICY: "active"}
"""libgomp's default while it manages no more threads than there are processors, and 1,000 spins, for "active", where it
does. The default there is 100: better for two nodes on two processors, and up to half worse for one that is alone."""

_UNSEEN: Final = {_SPINS: "1000"}
"""Where the kernel does not tell how long a thread waits: by default a batch that shares its processors would take many
times longer, and one whose threads sleep at once (0) 40 % longer."""


@contextmanager
def prepared_spinning() -> Iterator[bool]:
    """Set the environment while libgomp is loaded, which reads it then and never again, unless the operator has set it.

    Whether the spin may be adapted later.
    """
    if any(os.environ.get(switch) for switch in (_SPINS, _POLICY)):
        yield False
        return
    seen = waiting(os.getpid()) is not None  # the first thread: one that has just begun may have no account yet
    before = {switch: os.environ.get(switch) for switch in (_SPINS, _POLICY)}
    os.environ.update(_ADAPTED if seen else _UNSEEN)
    try:
        yield seen
    finally:  # children of this process are to decide for themselves
        for switch, value in before.items():
            os.environ.pop(switch, None)
            if value is not None:
                os.environ[switch] = value


def adapted_spinning(library: ctypes.CDLL, threads: int, processors: int) -> Spinning | None:
    """For a library, what it links to, batches of so many threads, and the processors there were when it was loaded.

    None where there is no team, or OpenMP is not GCC's.
    """
    of_gcc = hasattr(library, "GOMP_parallel") and not hasattr(library, "__kmpc_fork_call")  # LLVM's has both
    if threads < 2 or not of_gcc:
        return None
    parallel = library.GOMP_parallel  # a parallel region, as GCC compiles it since 4.9
    parallel.restype = None
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    nothing = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p)  # a void f(void *) that does nothing with a null
    more = max(2, processors - threads + 2)  # the process's first thread counts, and a master once
    return Spinning(lambda: parallel(nothing, None, more, 0))


class Spinning:
    """Lets the process's OpenMP threads spin long while the processors are theirs, and shortly while others want them.

    A thread that sleeps at a barrier has to be woken, and a virtual machine's processor that sleeps has to be given
    back by its host: on a busy host a batch whose threads sleep takes a tenth longer. But where two batches share
    processors, each spins while the other is to run, for seconds a batch. libgomp spins less where it manages more
    threads than there are processors (GOMP_SPINCOUNT in its manual); it has no other switch that can be thrown while a
    process runs. So the short spin is a thread that owns that many more, all asleep.

    The spin is short until a thread that calls ``working`` was seen to run undisturbed for a while. ``own_more`` makes
    the calling thread the master of so many threads that libgomp manages more than there are processors. The last
    caller of ``working`` is watched; where two threads of the process compute, libgomp makes the spin short itself.
    """

    def __init__(self, own_more: Callable[[], None]) -> None:
        self._own_more = own_more
        self._crowd = Crowd()
        self._owner: _Owner | None = None
        self._batches = 0
        self._thread = 0  # native id of the one that computes
        self._busy = Event()
        self._log = get_logger("worker")
        self.shorten()
        Thread(target=self._watch, name="spinning", daemon=True).start()

    @property
    def short(self) -> bool:
        """Whether threads sleep soon."""
        return self._owner is not None

    def working(self) -> None:
        """The calling thread is about to run a batch."""
        self._batches += 1
        self._thread = threading.get_native_id()
        if not self._busy.is_set():
            self._busy.set()

    def shorten(self) -> None:
        """From now on threads sleep soon; as before where Python may start no thread. libgomp, which starts one more
        for each processor that batches leave free, ends the process where it may not.
        """
        if self._owner is None:
            try:
                self._owner = _Owner(self._own_more)
            except RuntimeError as error:
                self._say(error=str(error))

    def lengthen(self) -> None:
        """From now on threads spin long."""
        if self._owner is not None:
            self._owner.end()
            self._owner = None

    def _watch(self) -> None:
        while self._busy.wait():
            batches, thread = self._batches, self._thread
            before = waiting(thread)
            time.sleep(_PERIOD_S)
            after = waiting(thread)
            if before is None or after is None:
                self._rest(batches)
                continue
            lately = after.since(before)
            self._adapt(self._crowd.saw(lately))
            if lately.wanted_s == 0:
                self._rest(batches)

    def _rest(self, batches: int) -> None:
        """Wait for the next batch; one that began meanwhile is not missed."""
        self._busy.clear()
        if self._batches != batches:
            self._busy.set()

    def _adapt(self, crowded: bool) -> None:
        if crowded == self.short:
            return
        self._say(short=crowded)
        if crowded:
            self.shorten()
        else:
            self.lengthen()

    def _say(self, **facts: object) -> None:
        if structlog.is_configured():  # in a program that set up no logging, stay silent
            self._log.debug("spinning", **facts)


class _Owner:
    """A thread that owns OpenMP threads. libgomp ends a thread's team soon after it, and counts it no more."""

    def __init__(self, own: Callable[[], None]) -> None:
        self._own = own
        self._owns, self._ended = Event(), Event()
        self._thread = Thread(target=self._live, name="short spin", daemon=True)
        self._thread.start()
        self._owns.wait()

    def end(self) -> None:
        """Return once it has ended."""
        self._ended.set()
        self._thread.join()

    def _live(self) -> None:
        try:
            self._own()
        finally:
            self._owns.set()
        self._ended.wait()
