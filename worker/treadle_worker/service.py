"""The worker's main thread: it keeps time, tells the broker that the process lives, and decides when it ends."""

from __future__ import annotations

import os
import select
import time
import uuid

from treadle_shared.config import NodeConfig
from treadle_shared.limits import MAX_DETAIL
from treadle_shared.log import get_logger
from treadle_shared.rundir import RuntimeDir
from treadle_shared.signals import StopSignals
from treadle_shared.ticks import Heartbeat, WorkerBye
from treadle_worker.bell import Bell
from treadle_worker.engines import START_ERRORS, OpenEngine
from treadle_worker.enginethread import EngineThread
from treadle_worker.handshake import EXIT_FAILURE
from treadle_worker.link import BrokerLink
from treadle_worker.status import WorkerStatus
from treadle_worker.watch import Watch


class WorkerService:
    """One worker process. ``run`` returns its exit code, or raises one of ``START_ERRORS``.

    One whose supervisor died stays for the broker that it serves, which drains and needs it, and for no other.
    """

    def __init__(self, config: NodeConfig, directory: RuntimeDir) -> None:
        self._config = config
        self._log = get_logger("worker")
        self._worker_id = uuid.uuid4().hex
        self._status = WorkerStatus()
        self._watch = Watch(self._status, config.tick_timeout_s)
        self._announced = False
        self._exit: int | None = None
        self._next_beat = 0.0
        self._link = BrokerLink(directory, config)
        self._bell = Bell()
        self._engine = EngineThread(config, self._worker_id, self._status, self._link, self._bell)
        self._signals = StopSignals(on_second=lambda number: os._exit(128 + number))
        self._poll = select.poll()
        for source in (self._bell, self._signals):
            self._poll.register(source, select.POLLIN)

    def run(self) -> int:
        """Serve until told to stop, refused for good, or without an engine."""
        self._log.debug("worker_starting", worker_id=self._worker_id, engine=self._config.engine)
        self._engine.start()
        while self._exit is None:
            self._wait()
            self._take_signals()
            self._keep_time(time.monotonic())
            self._check_engine()
        return self._leave(self._exit)

    # ---- the turns of the loop

    def _wait(self) -> None:
        wait_s = min(self._next_beat, self._watch.next_turn) - time.monotonic()
        self._poll.poll(1000 * max(wait_s, 0.0))
        self._bell.hush()
        self._signals.drain()

    def _take_signals(self) -> None:
        if self._signals.orphaned and not self._status.orphaned:
            self._log.info("worker_orphaned")
            self._status.orphaned = True
            self._look_around()
        if not self._signals.asked or self._status.draining:
            return
        self._log.info("worker_stopping", busy=self._status.tick_started is not None)
        self._watch.stopping()
        self._status.draining = True
        self._look_around()

    def _look_around(self) -> None:
        """Have the engine's thread see how things stand; it cannot while it loads, and nobody waits for that."""
        self._link.wake()
        if self._status.offer is None:
            self._exit = 0

    def _keep_time(self, now: float) -> None:
        if now >= self._next_beat:
            self._next_beat = now + self._config.heartbeat_s
            self._beat(now)
            self._tell_odd(now)
        if self._status.offer is not None and not self._announced:
            self._announced = True
            self._announce(self._status.offer)
        self._watch.keep(now)

    def _check_engine(self) -> None:
        """The thread ends when it was told to, when a broker refused it for good, or with a failure."""
        if not self._status.ended or self._exit is not None:
            return
        self._engine.join()
        failure = self._status.failure
        if isinstance(failure, START_ERRORS):
            self._say_goodbye(str(failure))
            self._link.close()
            self._close()
            raise failure
        if failure is not None:
            self._log.error("engine_failed", exc_info=failure)
        self._exit = self._status.exit_code if failure is None else EXIT_FAILURE

    # ---- what others hear

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
            status.unheard = True
            self._link.wake()
        if status.offer is None:
            self._watch.starting()

    def _tell_odd(self, now: float) -> None:
        for event, throttle in (("malformed_frames", self._link.malformed), ("ignored_ticks", self._status.ignored)):
            fresh = throttle.due(now)
            if fresh:
                self._log.warning(event, new=fresh, total=throttle.total)

    def _announce(self, offer: OpenEngine) -> None:
        """The engine has run its first decode."""
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

    # ---- the end

    def _leave(self, code: int) -> int:
        self._say_goodbye(f"exit {code}")
        self._log.info("worker_stopped", code=code)
        self._link.close()
        if self._engine.is_alive():  # it loads, and cannot be told to stop
            os._exit(code)
        self._close()
        return code

    def _say_goodbye(self, reason: str) -> None:
        self._link.send(WorkerBye(worker_id=self._worker_id, reason=reason[:MAX_DETAIL]))

    def _close(self) -> None:
        self._bell.close()
        self._signals.close()
        self._watch.close()
