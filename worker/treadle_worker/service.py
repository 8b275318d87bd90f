"""The worker's I/O thread: it answers at once, whatever the engine is doing."""

from __future__ import annotations

import math
import os
import time
import uuid
from collections.abc import Container
from typing import Any, Final

import zmq

from treadle_shared.config import NodeConfig
from treadle_shared.limits import MAX_DETAIL, PROTOCOL_MAJOR, PROTOCOL_MINOR
from treadle_shared.log import get_logger
from treadle_shared.rundir import RuntimeDir
from treadle_shared.signals import StopSignals
from treadle_shared.ticks import (
    Heartbeat,
    Probe,
    Tick,
    ToWorker,
    WorkerBye,
    WorkerHello,
    WorkerRefused,
    WorkerWelcome,
)
from treadle_worker.engines import START_ERRORS, OpenEngine
from treadle_worker.enginethread import RESULTS, EngineThread, Reset, Stop
from treadle_worker.handshake import EXIT_FAILURE, Handshake
from treadle_worker.link import BrokerLink
from treadle_worker.status import WorkerStatus
from treadle_worker.throttle import Throttle
from treadle_worker.watch import Watch

MAX_OUTSTANDING: Final = 4  # ticks handed to the engine and not finished; a broker keeps two in flight
_RESULT_BURST: Final = 64  # results forwarded in one turn; more than outstanding ticks can have
_JOIN_S: Final = 5.0  # how long an idle engine may take to free its model before the process just ends


class WorkerService:
    """One worker process. ``run`` returns its exit code, or raises one of ``START_ERRORS``."""

    def __init__(self, config: NodeConfig, directory: RuntimeDir) -> None:
        self._config = config
        self._log = get_logger("worker")
        self._worker_id = uuid.uuid4().hex
        self._status = WorkerStatus()
        self._handshake = Handshake()
        self._watch = Watch(self._status, config.tick_timeout_s)
        self._ignored = Throttle()
        self._accepted = 0  # ticks handed to the engine thread
        self._announced = False
        self._exit: int | None = None
        self._next_beat = 0.0
        self._net: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._inside: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=0)  # inproc needs none
        self._link = BrokerLink(self._net, directory.worker, config)
        self._results = self._inside.socket(zmq.PAIR)
        self._results.bind(RESULTS)
        self._engine = EngineThread(config, self._status, self._inside)
        self._signals = StopSignals(on_second=lambda number: os._exit(128 + number))
        self._poller = self._make_poller()

    def run(self) -> int:
        """Serve until told to stop, refused for good, or without an engine."""
        self._log.debug("worker_starting", worker_id=self._worker_id, engine=self._config.engine)
        self._engine.start()
        while self._exit is None:
            ready = self._wait()
            now = time.monotonic()
            self._take_signals(ready)
            self._take_results(ready, now)
            self._take_messages(ready, now)
            self._keep_time(now)
            self._check_engine()
        return self._leave(self._exit)

    # ---- the turns of the loop

    def _wait(self) -> set[Any]:
        """Sockets and descriptors with something to read: the engine waits for the processor while others are tried."""
        wait_s = max(self._next_turn() - time.monotonic(), 0.0)
        return {source for source, _ in self._poller.poll(math.ceil(wait_s * 1000))}

    def _make_poller(self) -> zmq.Poller:
        poller = zmq.Poller()
        for source in (self._link.socket, self._results, self._signals.fileno()):
            poller.register(source, zmq.POLLIN)
        return poller

    def _next_turn(self) -> float:
        """When the loop must run though nothing arrives."""
        turns = [self._next_beat, self._watch.next_turn]
        if self._announced and self._handshake.next_hello is not None:
            turns.append(self._handshake.next_hello)
        return min(turns)

    def _take_signals(self, ready: Container[Any]) -> None:
        if self._signals.fileno() in ready:
            self._signals.drain()
        if not self._signals.asked or self._status.draining:
            return
        self._log.info("worker_stopping", busy=self._status.tick_started is not None)
        self._watch.stopping()
        self._status.draining = True
        if self._status.offer is None:  # a load cannot be interrupted, and nobody waits for it
            self._exit = 0
        self._engine.put(Stop())

    def _take_results(self, ready: Container[Any], now: float) -> None:
        if self._results not in ready:
            return
        for _ in range(_RESULT_BURST):
            try:
                result = self._results.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            if result and not self._link.send(result):
                self._broker_silent(now, "it takes no results")

    def _take_messages(self, ready: Container[Any], now: float) -> None:
        if self._link.socket in ready:
            for message in self._link.receive():
                self._handle(message, now)
        for event, throttle in (("malformed_frames", self._link.malformed), ("ignored_ticks", self._ignored)):
            fresh = throttle.due(now)
            if fresh:
                self._log.warning(event, new=fresh, total=throttle.total)

    def _keep_time(self, now: float) -> None:
        if now >= self._next_beat:
            self._next_beat = now + self._config.heartbeat_s
            self._beat(now)
        if self._status.offer is not None:
            self._announce(self._status.offer)
            if self._handshake.hello_due(now):
                self._handshake.said_hello(now, self._link.send(self._hello(self._status.offer)))
        self._watch.keep(now)

    def _check_engine(self) -> None:
        """The thread ends when it was told to, or with a failure."""
        if not self._status.ended or self._exit is not None:
            return
        self._engine.join()
        self._take_results({self._results}, time.monotonic())  # those of its last tick
        failure = self._status.failure
        if isinstance(failure, START_ERRORS):
            self._say_goodbye(str(failure))
            self._close()
            raise failure
        if failure is not None:
            self._log.error("engine_failed", exc_info=failure)
        self._exit = 0 if failure is None else EXIT_FAILURE

    # ---- messages

    def _handle(self, message: ToWorker, now: float) -> None:
        match message:
            case Tick():
                self._tick(message)
            case WorkerWelcome():
                self._welcomed(message)
            case WorkerRefused():
                self._refused(message, now)
            case Probe():
                pass

    def _tick(self, tick: Tick) -> None:
        """Only ticks of the broker that welcomed this worker run, and only as many as a broker may have out."""
        mine = tick.broker_id == self._status.broker_id and tick.worker_id == self._worker_id
        if not mine or self._accepted - self._status.progress >= MAX_OUTSTANDING:
            self._ignored.count()
            return
        self._accepted += 1
        self._engine.put(tick)

    def _welcomed(self, welcome: WorkerWelcome) -> None:
        if welcome.worker_id != self._worker_id or self._status.offer is None:
            return
        if welcome.major != PROTOCOL_MAJOR:
            self._log.error("refused_for_good", reason="version", message=f"the broker speaks {welcome.major}")
            self._exit = EXIT_FAILURE
            return
        self._log.info("welcomed", broker_id=welcome.broker_id)
        self._engine.put(Reset())
        self._handshake.welcomed(welcome.broker_id)
        self._status.broker_id = welcome.broker_id

    def _refused(self, refusal: WorkerRefused, now: float) -> None:
        if self._status.offer is None:  # nothing was offered yet
            return
        code = self._handshake.exit_code(refusal.reason)
        if code is not None:
            self._log.error("refused_for_good", reason=refusal.reason, message=refusal.message)
            self._exit = code
        elif refusal.reason == "unknown":
            self._broker_lost(now, "it does not know this worker")
        else:
            self._handshake.busy(now)
            self._log.info("broker_busy", reason=refusal.reason, message=refusal.message)

    def _broker_lost(self, now: float, why: str) -> bool:
        """Keep the model, free every slot, and offer the engine anew; False where no broker was served."""
        if not self._handshake.lost(now):
            return False
        self._log.warning("broker_lost", why=why)
        self._status.broker_id = ""
        self._engine.put(Reset())
        return True

    def _broker_silent(self, now: float, why: str) -> None:
        """Nobody takes what is sent. On a new connection the broker sees a newcomer, whatever it still believes."""
        if self._broker_lost(now, why):
            self._link.reopen()
            self._poller = self._make_poller()

    def _beat(self, now: float) -> None:
        status = self._status
        beat = Heartbeat(
            worker_id=self._worker_id,
            pid=os.getpid(),
            phase="draining" if status.draining else status.phase,
            load=status.load,
            progress=status.progress,
            tick_age_s=status.tick_age(now),
        )
        if not self._link.send(beat):
            self._broker_silent(now, "it takes no heartbeats")
        if status.offer is None:
            self._watch.starting()

    def _hello(self, offer: OpenEngine) -> WorkerHello:
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

    # ---- standing

    def _announce(self, offer: OpenEngine) -> None:
        """Once: the engine has run its first decode."""
        if self._announced:
            return
        self._announced = True
        facts, start_s = offer.engine.facts, round(time.monotonic() - self._status.born, 3)
        self._log.info(
            "worker_ready",
            model=offer.model,
            device=offer.device,
            start_s=start_s,
            exact=facts.exact,
            exact_detail=offer.exact_detail,
            recipe=facts.recipe_fingerprint,
            weight_bytes=facts.weight_bytes,
        )
        self._watch.ready(f"serving {offer.model} on {offer.device}")

    def _leave(self, code: int) -> int:
        self._say_goodbye(f"exit {code}")
        self._stop_engine()
        self._log.info("worker_stopped", code=code)
        self._close()
        if self._engine.is_alive():
            os._exit(code)
        return code

    def _say_goodbye(self, reason: str) -> None:
        self._link.send(WorkerBye(worker_id=self._worker_id, reason=reason[:MAX_DETAIL]))

    def _stop_engine(self) -> None:
        """Let an engine that is idle free its model; one that still loads is left to the process's end."""
        if self._status.offer is not None:
            self._status.draining = True
            self._engine.put(Stop())
            self._engine.join(_JOIN_S)

    def _close(self) -> None:
        self._link.close()
        self._net.term()  # returns when the last messages have left, or their time is over
        if not self._engine.is_alive():
            self._results.close(linger=0)
            self._inside.term()
        self._signals.close()
        self._watch.close()
