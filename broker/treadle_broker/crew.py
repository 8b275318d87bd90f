"""The broker's dealings with its worker: hello, ticks, results, loss."""

from __future__ import annotations

import time
from collections.abc import Callable, Container
from typing import Any

from treadle_broker.delivery import Delivery
from treadle_broker.library import StreamLibrary
from treadle_broker.node_facts import derive_budget
from treadle_broker.plan import Plan
from treadle_broker.publisher import Publisher
from treadle_broker.scheduler import Scheduler
from treadle_broker.tick_builder import build_tick
from treadle_broker.worker_link import WorkerLink
from treadle_shared.config import NodeConfig
from treadle_shared.limits import PROTOCOL_MAJOR
from treadle_shared.log import get_logger
from treadle_shared.ticks import FromWorker, TickResult, WorkerBye, WorkerHello

_log = get_logger("worker")
_ANSWER_GRACE_S = 5.0  # beyond the tick timeout, at which a worker that is stuck ends itself


class Crew:
    """Connects the scheduler with whichever worker serves it."""

    def __init__(
        self,
        config: NodeConfig,
        link: WorkerLink,
        scheduler: Scheduler,
        library: StreamLibrary,
        delivery: Delivery,
        publisher: Publisher,
        tokenizer_fingerprint: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lost_at = clock()
        self._config = config
        self._link = link
        self._scheduler = scheduler
        self._library = library
        self._delivery = delivery
        self._publisher = publisher
        self._tokenizer_fingerprint = tokenizer_fingerprint
        self._clock = clock
        self._owed_since = 0.0  # when the oldest tick in flight became due: sent, or the one before it answered

    def listen(self, ready: Container[Any], now: float) -> None:
        """Take what the worker said, where its sockets are ``ready``."""
        if self._link.socket in ready:
            for message in self._link.receive(now):
                self._take(message, now)
        if self._link.monitor in ready:
            self._link.hear_ends(now)
        if self._link.disconnected(now):
            self._lose(now, "worker disconnected")

    def excuse(self, seconds: float) -> None:
        """This process slept for so long: what the worker said or owed meanwhile may be still on its way."""
        self._link.excuse(seconds)
        self._owed_since += seconds

    def watch(self, now: float) -> None:
        """Give up a worker that is silent, or owes an answer, for too long."""
        if self._link.silent(now):
            self._lose(now, "worker silent")
        owed = self._scheduler.ready and self._scheduler.awaits_answer
        if owed and now - self._owed_since > self._config.tick_timeout_s + _ANSWER_GRACE_S:
            self._lose(now, "a tick was not answered")

    def schedule(self, now: float) -> None:
        """Send every tick that may be in flight."""
        if not self._scheduler.awaits_answer:
            self._owed_since = now
        while (plan := self._scheduler.plan(now)) is not None:
            peer = self._link.welcomed
            assert peer is not None
            tick = build_tick(plan, self._link.broker_id, peer.worker_id, self._library.get)
            if not self._link.send(tick):
                self._lose(now, "worker unreachable")
                return
            self._publish_plan(plan)

    def _take(self, message: FromWorker, now: float) -> None:
        if isinstance(message, TickResult):
            self._result(message, now)
        elif isinstance(message, WorkerHello):
            self._hello(message, now)
        elif isinstance(message, WorkerBye):
            self._lose(now, f"worker left: {message.reason}")

    def _result(self, result: TickResult, now: float) -> None:
        if result.broker_id != self._link.broker_id:
            return
        self._owed_since = now
        if self._scheduler.overtaken(result):
            self._lose(now, "a tick was not answered")
            return
        self._delivery.take(self._scheduler.complete(result, now), now)
        if result.error:
            _log.warning("tick_failed", tick_id=result.tick_id, code=result.error_code, error=result.error)
        self._publisher.publish(
            "tick",
            {
                "event": "ran" if not result.error else "failed",
                "tick_id": result.tick_id,
                "part": result.part,
                "rows": len(result.rows),
                "skipped": len(result.skipped),
                "error": result.error,
                "engine_s": result.timings.engine_s,
                "sample_s": result.timings.sample_s,
                "total_s": result.timings.total_s,
                "kv_drift_rows": self._scheduler.kv_drift_rows,
            },
        )

    def _hello(self, hello: WorkerHello, now: float) -> None:
        if self._scheduler.ready:  # its old connection is gone, and with it what was sent there
            self._delivery.take(self._scheduler.worker_lost(now, "worker came back"), now)
        refusal = self._unfit(hello)
        if refusal is not None:
            _log.error("worker_refused", reason=refusal[0], why=refusal[1], pid=hello.pid)
            self._link.refuse(*refusal)
            return
        if not self._link.welcome(hello):
            self._link.forget()
            return
        budget = derive_budget(self._config, hello.facts)
        self._delivery.take(self._scheduler.worker_ready(hello.facts, now, budget), now)
        if hello.facts.context_tokens < self._config.session_tokens:
            _log.warning("session_tokens_clamped", to=hello.facts.context_tokens, by="the model")
        _log.info(
            "worker_ready",
            worker_id=hello.worker_id,
            pid=hello.pid,
            engine=hello.engine,
            numerics=hello.numerics,
            exact=hello.facts.exact,
            exact_detail=hello.exact_detail,
            weight_bytes=hello.facts.weight_bytes,
            recipe=hello.facts.recipe_fingerprint,
        )

    def _unfit(self, hello: WorkerHello) -> tuple[str, str] | None:
        """Why this worker cannot serve this broker, or None."""
        if hello.major != PROTOCOL_MAJOR:
            return "version", f"this broker speaks version {PROTOCOL_MAJOR}, the worker {hello.major}"
        facts = hello.facts
        if facts.tokenizer_fingerprint != self._tokenizer_fingerprint:
            return "tokenizer", "the worker's model tokenises otherwise than the broker's"
        if facts.max_sequences < self._config.effective_slots:
            return "recipe", f"the worker has {facts.max_sequences} slots, not {self._config.effective_slots}"
        return None

    def _lose(self, now: float, why: str) -> None:
        peer = self._link.peer
        self._link.forget()
        self.lost_at = now
        if not self._scheduler.ready:
            return
        _log.warning("worker_lost", why=why, pid=peer.pid if peer else None)
        self._delivery.take(self._scheduler.worker_lost(now, why), now)

    def _publish_plan(self, plan: Plan) -> None:
        self._publisher.publish(
            "tick",
            {
                "event": "sent",
                "tick_id": plan.tick_id,
                "resync": plan.resync,
                "release": list(plan.release),
                "decode": len(plan.decode),
                "prefill": [row.n for row in plan.prefill],
                "keep": [row.rows for row in plan.keep],
                "copy": [row.rows for row in plan.copy],
                "hold": plan.hold,
            },
        )
