"""An open engine at its broker's service: offered, welcomed, given ticks."""

from __future__ import annotations

import os
import time
from collections import deque
from typing import Final

from treadle_shared.config import NodeConfig
from treadle_shared.limits import MAX_ANSWERS, MAX_TOGETHER, PROTOCOL_MAJOR, PROTOCOL_MINOR
from treadle_shared.log import get_logger
from treadle_shared.runner import TickRunner
from treadle_shared.ticks import Probe, Tick, TickResult, ToWorker, WorkerHello, WorkerRefused, WorkerWelcome
from treadle_worker.engines import OpenEngine
from treadle_worker.handshake import EXIT_FAILURE, Handshake, Standing
from treadle_worker.link import BrokerLink
from treadle_worker.status import WorkerStatus

_PARTS: Final = 2  # answers that a tick has at most
MAX_OUTSTANDING: Final = 4 * MAX_TOGETHER  # ticks taken and not run; a broker has half of them out


class Serving:
    """What the engine's thread does once the engine is open, until the worker is told to stop or refused for good.

    It listens itself: a thread that handed ticks and results over would take processors from the batch, twice a tick,
    and a batch waits for the slowest of its threads. Between two ticks nothing else is there to be done; during one,
    whatever arrives can wait for its end.
    """

    def __init__(
        self, config: NodeConfig, worker_id: str, offer: OpenEngine, status: WorkerStatus, link: BrokerLink
    ) -> None:
        self._config = config
        self._worker_id = worker_id
        self._offer = offer
        self._status = status
        self._link = link
        self._runner = TickRunner(offer.engine)
        self._handshake = Handshake()
        self._ticks: deque[Tick] = deque()
        self._held: list[TickResult] = []  # answers that wait for the next tick's
        self._held_since = 0.0
        self._ignored = status.ignored
        self._log = get_logger("worker")
        self._exit: int | None = None

    def run(self) -> int:
        """Serve; the exit code."""
        self._link.drop_waiting()  # it was said to a worker that had nothing to offer yet
        try:
            return self._serve()
        finally:
            self._answer()

    def _serve(self) -> int:
        while not self._is_over():
            for message in self._link.receive():
                self._handle(message)
            self._keep_standing(time.monotonic())
            if self._held and not self._may_wait(time.monotonic()):
                self._answer()
            if self._is_over():  # asked after the link was heard, or the ring that tells of it would be lost
                break
            if self._ticks:
                self._run(self._ticks.popleft())
            else:
                self._link.wait(self._patience())
        return self._exit or 0

    def _is_over(self) -> bool:
        if self._status.orphaned and self._handshake.standing is Standing.OFFERING:
            return True
        return self._exit is not None or self._status.draining

    # ---- messages

    def _handle(self, message: ToWorker) -> None:
        match message:
            case Tick():
                self._take(message)
            case WorkerWelcome():
                self._welcomed(message)
            case WorkerRefused():
                self._refused(message, time.monotonic())
            case Probe():
                pass

    def _take(self, tick: Tick) -> None:
        """Only ticks of the broker that welcomed this worker run, and only as many as a broker may have out."""
        mine = self._handshake.serves(tick.broker_id) and tick.worker_id == self._worker_id
        if mine and len(self._ticks) < MAX_OUTSTANDING:
            self._ticks.append(tick)
        else:
            self._ignored.count()

    def _welcomed(self, welcome: WorkerWelcome) -> None:
        if welcome.worker_id != self._worker_id:
            return
        if welcome.major != PROTOCOL_MAJOR:
            self._log.error("refused_for_good", reason="version", message=f"the broker speaks {welcome.major}")
            self._exit = EXIT_FAILURE
            return
        self._log.info("welcomed", broker_id=welcome.broker_id)
        self._handshake.welcomed(welcome.broker_id)
        self._status.unheard = False  # that was before
        self._empty()

    def _refused(self, refusal: WorkerRefused, now: float) -> None:
        code = self._handshake.exit_code(refusal.reason)
        if code is not None:
            self._log.error("refused_for_good", reason=refusal.reason, message=refusal.message)
            self._exit = code
        elif refusal.reason == "unknown":
            self._lost(now, "it does not know this worker")
        else:
            self._handshake.busy(now)
            self._log.info("broker_busy", reason=refusal.reason, message=refusal.message)

    # ---- standing

    def _patience(self) -> float | None:
        """How long to wait for a message; None where only a message brings anything to do."""
        due = self._handshake.next_hello
        return None if due is None else due - time.monotonic()

    def _keep_standing(self, now: float) -> None:
        """See to a broker that takes nothing any more, and say hello when it is due."""
        if self._status.unheard:
            self._status.unheard = False
            # on a new connection the broker sees a newcomer, whatever it still believes
            if self._lost(now, "it takes no messages"):
                self._link.reopen()
        if self._handshake.hello_due(now) and not self._is_over():
            self._handshake.said_hello(now, self._link.send(self._hello()))

    def _lost(self, now: float, why: str) -> bool:
        """Keep the model, free every slot, and offer the engine anew; False where no broker was served."""
        if not self._handshake.lost(now):
            return False
        self._log.warning("broker_lost", why=why)
        self._empty()
        return True

    def _empty(self) -> None:
        """Whoever sends ticks next knows no slot."""
        self._ticks.clear()
        self._held.clear()
        self._runner.reset()

    def _hello(self) -> WorkerHello:
        offer = self._offer
        return WorkerHello(
            major=PROTOCOL_MAJOR,
            minor=PROTOCOL_MINOR,
            worker_id=self._worker_id,
            pid=os.getpid(),
            engine=self._config.engine,
            model=offer.model,
            numerics=self._config.effective_numerics,
            facts=offer.engine.facts,
            device=offer.device,
            exact_detail=offer.exact_detail,
        )

    # ---- ticks

    def _run(self, tick: Tick) -> None:
        """Its results leave as they come, the decode part before its prefill runs; but for one that may wait."""
        status = self._status
        status.tick_started = time.monotonic()
        for part in self._runner.run(tick):
            self._held_since = self._held_since if self._held else time.monotonic()
            self._held.append(part)
            if not (tick.hold and _all_go_on(part)):
                self._answer()
        status.tick_started = None
        status.progress += 1

    def _may_wait(self, now: float) -> bool:
        """Whether the answers that are held will leave with the next tick's, and soon."""
        full = len(self._held) > MAX_ANSWERS - _PARTS
        if not self._ticks or full or now - self._held_since >= self._config.coalesce_ms / 1000:
            return False
        tick = self._ticks[0]
        return bool(tick.decode) and not (tick.keep or tick.park or tick.release or tick.restore or tick.copy)

    def _answer(self) -> None:
        """Every answer leaves, in the order of their ticks; together, so that the broker turns once for all of them."""
        if self._held and not self._link.send(*self._held):
            self._status.unheard = True
        self._held.clear()


def _all_go_on(part: TickResult) -> bool:
    """Whether every row of an answer has run, and no sequence has ended with it."""
    return not (part.error or part.skipped) and not any(row.eog or row.miss for row in part.rows)
