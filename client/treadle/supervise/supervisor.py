"""Keeps a node's broker and worker running, and ends them in the right order."""

from __future__ import annotations

import queue
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import IO, Any, Final

from treadle.supervise.child import Child
from treadle.supervise.hearing import Hearing
from treadle.supervise.restart import RestartPolicy
from treadle.supervise.watch import StatusWatch
from treadle_shared.errors import EXIT_CONFIG
from treadle_shared.rundir import RuntimeDir

DRAIN_GRACE_S: Final = 5.0  # after its drain timeout a broker only has to say goodbye
WORKER_STOP_S: Final = 10.0  # a worker has to finish one tick and unload
ECHO_S: Final = 0.1  # a tool that signals a process and its group sends one request twice
KILLED_S: Final = 2.0  # the kernel needs no longer

BROKER: Final = "broker"
WORKER: Final = "worker"


class Phase(Enum):
    """How far the node's end has come."""

    RUNNING = "running"
    DRAINING = "draining"  # the broker finishes what runs; the worker is needed for it
    STOPPING = "stopping"  # the worker goes
    OVER = "over"


@dataclass(frozen=True, slots=True)
class _Died:
    name: str
    code: int


@dataclass(frozen=True, slots=True)
class _StopAsked:
    number: int


@dataclass(frozen=True, slots=True)
class _Seen:
    facts: dict[str, Any] | None


_News = _Died | _StopAsked | _Seen


class Supervisor:
    """Runs a node until it is asked to stop, its broker has drained, or a child cannot live.

    ``say`` gets one line for people on each event, ``on_status`` the node's facts while it is not ready, and
    ``on_ready`` its facts once, the first time it is. Both are called in the thread of ``run``.
    """

    def __init__(
        self,
        directory: RuntimeDir,
        drain_timeout_s: float,
        say: Callable[[str], None],
        on_ready: Callable[[dict[str, Any]], None],
        on_status: Callable[[dict[str, Any] | None], None] = lambda facts: None,
        output: IO[bytes] | None = None,
    ) -> None:
        self._say = say
        self._on_ready = on_ready
        self._on_status = on_status
        self._drain_timeout_s = drain_timeout_s
        self._news: queue.SimpleQueue[_News] = queue.SimpleQueue()  # bounded by children, signals and one poller
        arguments = ["--runtime-dir", str(directory.path)]
        self._children = {
            name: Child(name, ["-m", f"treadle_{name}", *arguments], self._on_death, output)
            for name in (BROKER, WORKER)
        }
        self._policies = {name: RestartPolicy() for name in self._children}
        self._hearing = Hearing()
        self._restart_at: dict[str, float] = {}
        self._watch = StatusWatch(directory, lambda facts: self._news.put(_Seen(facts)))
        self._phase = Phase.RUNNING
        self._kill_at: float | None = None
        self._was_ready = False
        self._restarted = False  # since it was ready last
        self._welcomes = 0  # of workers, as the broker told it last
        self._signals = 0
        self._asked_at = -ECHO_S
        self._code = 0

    def request_stop(self, number: int = signal.SIGTERM) -> None:
        """Drain; a second time: kill. Callable from a signal handler and from any thread."""
        self._news.put(_StopAsked(number))

    def run(self) -> int:
        """Start the node and see it through; the exit code. 0 after a clean drain."""
        try:
            for name in self._children:
                self._start(name)
            self._watch.look()
            while self._phase is not Phase.OVER:
                self._turn()
        finally:
            self._kill()
            self._watch.close()
        return self._code

    # ---- one turn

    def _turn(self) -> None:
        news = self._next()
        match news:
            case _Died():
                self._died(news.name, news.code)
            case _StopAsked():
                self._stop_asked(news.number)
            case _Seen():
                self._seen(news.facts)
        self._act(time.monotonic())

    def _next(self) -> _News | None:
        deadlines = [*self._restart_at.values(), *([self._kill_at] if self._kill_at is not None else [])]
        timeout = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
        try:
            return self._news.get(timeout=timeout)
        except queue.Empty:
            return None

    def _act(self, now: float) -> None:
        """What is due: restarts, and the end of patience."""
        for name in [name for name, at in self._restart_at.items() if at <= now]:
            del self._restart_at[name]
            self._start(name)
        if self._kill_at is not None and self._kill_at <= now:
            self._say("stopping takes too long; killing what is left")
            self._code = self._code or 1
            self._kill()
            self._kill_at = now + KILLED_S

    def _start(self, name: str) -> None:
        self._children[name].start()
        self._hearing.started(name, time.monotonic())

    # ---- news

    def _on_death(self, name: str, code: int) -> None:
        self._news.put(_Died(name, code))

    def _died(self, name: str, code: int) -> None:
        if self._phase is Phase.STOPPING or (name == BROKER and self._phase is Phase.DRAINING):
            self._went(name, code)
        elif name == BROKER and code == 0:
            self._say("the broker has drained")
            self._stop_rest()
        else:
            self._restart(name, code)

    def _went(self, name: str, code: int) -> None:
        """A child that was told to go has gone."""
        if name == BROKER and code not in (0, -signal.SIGTERM):  # SIGTERM: it was too young to catch it
            self._code = self._code or 1
        if self._phase is Phase.DRAINING:
            self._stop_rest()
        elif all(child.pid is None for child in self._children.values()):
            self._phase = Phase.OVER

    def _restart(self, name: str, code: int) -> None:
        delay = self._policies[name].died(code)
        if delay is None:
            self._give_up(name, code)
            return
        self._say(f"the {name} {how_it_ended(code)}; restarting it in {delay:g} s")
        self._restarted = self._was_ready
        self._restart_at[name] = time.monotonic() + delay
        self._watch.look()

    def _give_up(self, name: str, code: int) -> None:
        why = "its configuration cannot work" if code == EXIT_CONFIG else "it dies again and again"
        self._say(f"the {name} {how_it_ended(code)}: {why}; stopping the node")
        self._code = EXIT_CONFIG if code == EXIT_CONFIG else 1
        self._stop_rest()

    def _stop_asked(self, number: int) -> None:
        if time.monotonic() - self._asked_at < ECHO_S:
            return
        self._asked_at = time.monotonic()
        self._signals += 1
        if self._signals > 1:
            self._say("killing the node")
            self._code = 128 + number
            self._phase = Phase.STOPPING
            self._restart_at.clear()
            self._kill()
            self._end_if_gone()
            return
        if self._phase is not Phase.RUNNING:
            return
        self._say("draining")
        self._drain()

    def _seen(self, facts: dict[str, Any] | None) -> None:
        self._note_progress(facts)
        if self._phase is not Phase.RUNNING:
            self._watch.rest()
            return
        self._listen(facts, time.monotonic())
        if facts is None or not self._is_ready(facts):
            if facts is not None or self._restarted or not self._was_ready:  # a drained broker just goes
                self._on_status(facts)
            return
        self._watch.rest()
        if not self._was_ready:
            self._was_ready = True
            self._on_ready(facts)
        elif self._restarted:
            self._restarted = False
            self._say("ready again")

    def _listen(self, facts: dict[str, Any] | None, now: float) -> None:
        """Kill a child that runs and is not heard; its death brings the next one."""
        if facts is None:
            self._hearing.excuse(WORKER, now)  # only the broker could tell
        else:
            self._hearing.heard(BROKER, now)
            if (facts.get("pids") or {}).get(WORKER) == self._children[WORKER].pid:
                self._hearing.heard(WORKER, now)
        for name, child in self._children.items():
            if child.pid is not None and self._hearing.is_lost(name, now):
                self._say(f"the {name} is there but does nothing; killing it")
                child.signal(signal.SIGKILL)
                self._hearing.started(name, now)

    def _note_progress(self, facts: dict[str, Any] | None) -> None:
        """A broker that answers got somewhere, a worker once the node is ready; one that was welcomed has lived."""
        if facts is None:
            return
        self._policies[BROKER].progressed()
        welcomes = int(facts.get("worker_welcomes") or 0)
        if welcomes != self._welcomes:
            self._welcomes = welcomes
            self._policies[WORKER].lived()
        if self._is_ready(facts):
            self._policies[WORKER].progressed()

    def _is_ready(self, facts: dict[str, Any]) -> bool:
        """Whether the node is ready with the processes of now; a broker may not have missed a dead worker yet."""
        pids = facts.get("pids") or {}
        mine = all(pids.get(name) == child.pid for name, child in self._children.items())
        return bool(facts.get("ready")) and mine

    # ---- the end

    def _drain(self) -> None:
        broker = self._children[BROKER]
        self._restart_at.pop(BROKER, None)
        if broker.pid is None:
            self._stop_rest()
            return
        self._phase = Phase.DRAINING
        broker.signal(signal.SIGTERM)
        self._kill_at = time.monotonic() + self._drain_timeout_s + DRAIN_GRACE_S

    def _stop_rest(self) -> None:
        self._phase = Phase.STOPPING
        self._restart_at.clear()
        self._kill_at = time.monotonic() + WORKER_STOP_S
        for child in self._children.values():
            child.signal(signal.SIGTERM)
        self._end_if_gone()

    def _end_if_gone(self) -> None:
        if all(child.pid is None for child in self._children.values()):
            self._phase = Phase.OVER

    def _kill(self) -> None:
        for child in self._children.values():
            child.signal(signal.SIGKILL)


def how_it_ended(code: int) -> str:
    """An exit code of subprocess in words."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
