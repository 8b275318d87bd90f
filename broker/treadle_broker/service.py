"""The broker process: one thread, one poller, everything else called from here."""

from __future__ import annotations

import secrets
import time
from typing import Any

import zmq

from treadle_broker.connections import Connection, Connections
from treadle_broker.crew import Crew
from treadle_broker.delivery import Delivery
from treadle_broker.desk import Desk
from treadle_broker.drain import DrainClock, Phase
from treadle_broker.intake import Intake
from treadle_broker.library import StreamLibrary
from treadle_broker.node_facts import derive_budget, expected_facts
from treadle_broker.prefix_hash import PrefixSharing
from treadle_broker.publisher import Publisher
from treadle_broker.side_thread import SideThread
from treadle_broker.status import Status
from treadle_broker.stream import Stream
from treadle_broker.submissions import Submissions
from treadle_broker.text import ChatTemplate, Tokenizer
from treadle_broker.tick_log import TickLog, make_scheduler
from treadle_broker.worker_link import WorkerLink
from treadle_shared.budget import check_serves
from treadle_shared.config import NodeConfig
from treadle_shared.limits import MAX_FRAME_BYTES
from treadle_shared.log import get_logger
from treadle_shared.notify import Notifier
from treadle_shared.rundir import RuntimeDir
from treadle_shared.signals import StopSignals

_log = get_logger("broker")
_LONGEST_TURN_S = 0.5  # a turn takes milliseconds and waits for at most half of this
_IDLE_WAIT_S = 0.25  # the longest sleep: bounds how late silence and orphans are noticed
_BLOCKED_WAIT_S = 0.05  # the longest sleep while a client's socket is full
_POSITIONS_S = 1.0  # how often waiting clients hear of their place
_NO_WORKER_S = 30.0  # how long requests are taken while no worker is heard of: a restart takes a few seconds
_CLIENT_HWM = 64  # frames a client may be behind in its socket; the rest waits in its streams' logs
_CLIENT_BACKLOG = 1024  # connections that may wait to be accepted


class Broker:
    """One node's broker, from its sockets to its last message."""

    def __init__(
        self,
        config: NodeConfig,
        directory: RuntimeDir,
        tokenizer: Tokenizer,
        notifier: Notifier,
        tick_log: TickLog | None = None,
    ) -> None:
        self.boot_id = secrets.token_hex(8)
        self._config = config
        self._notifier = notifier
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._clients = self._router(directory.clients)
        self._control = self._router(directory.control)
        self._publisher = Publisher(self._context, directory, self.boot_id, config.telemetry_replay)
        self._link = WorkerLink(self._context, directory, self.boot_id, config.worker_silence_s)
        self._signals = StopSignals()
        self._side = SideThread()
        self._build(tokenizer, tick_log, config.prefix_sharing or ("client" if directory.open_to_group else "node"))
        self._poller = self._make_poller()
        self._drain = DrainClock(config.drain_timeout_s)
        self._orphans: dict[Stream, float] = {}
        self._attended_s = 0.0  # see _attend
        self._attended_at = time.monotonic()
        self._next_snapshot = 0.0
        self._next_positions = 0.0
        self._last_worker: dict[str, Any] = {}
        self._watchdog_s = notifier.watchdog_s
        self._next_watchdog = 0.0

    def run(self) -> int:
        """Serve until told to stop; the exit code."""
        self._notifier.ready("serving")
        _log.info("serving", model=self._config.model, max_sessions=self._config.max_sessions)
        try:
            while self._drain.phase is not Phase.STOPPED:
                self._turn()
        finally:
            self._close()
        _log.info("stopped", forced=self._drain.forced)
        return 1 if self._drain.forced else 0

    def _turn(self) -> None:
        """Receive, handle, deliver, look at timers, schedule, deliver what came of that, publish.

        What has come goes out before the next tick is planned, since the engine usually has one to run: the clients'
        work falls beside the planning. Who is behind gets one frame then, so that the engine need not wait for it.
        """
        ready = self._wait(time.monotonic())
        now = time.monotonic()
        self._attend(now)
        self._receive(ready, now)
        self._lose_clients(self._connections.flush(now, frames=1))
        self._on_time(now)
        self._crew.schedule(now)
        self._delivery.take([*self._scheduler.take_promoted(), *self._submissions.take_ended()], now)
        self._lose_clients(self._connections.flush(now))
        self._publish(now)
        self._stop_step(now)

    def _wait(self, now: float) -> set[Any]:
        """Sockets and descriptors with something to read. Reading the others would cost more than the turn."""
        return {source for source, _ in self._poller.poll(self._wait_ms(now))}

    def _receive(self, ready: set[Any], now: float) -> None:
        self._crew.listen(ready, now)
        if self._control in ready:
            self._control_desk.serve(now)
        if self._clients in ready:
            self._client_desk.serve(now)
        if self._side.fileno() in ready:
            self._side.settle()
        if self._signals.fileno() in ready:
            self._signals.drain()
        self._publisher.serve(ready)

    # ---- what the desk asks

    @property
    def context_tokens(self) -> int:
        """What one session holds."""
        return self._scheduler.facts.context_tokens

    def facts(self, what: str, admin: bool) -> dict[str, Any] | None:
        """Answers to Ask; None for questions that are not asked here."""
        now = time.monotonic()
        if what == "status":
            return self._status.status(now, self._drain.draining) | {"counters": self._odd_counts()}
        if what == "model":
            return self._status.model()
        if what == "telemetry":
            return self._scheduler.telemetry(now).to_dict()
        if what == "sessions" and admin:
            return self._status.sessions(now)
        return None

    def begin_drain(self, timeout_s: float | None) -> None:
        """Refuse what is new, finish what runs, then stop."""
        self._scheduler.drain()
        self._drain.begin(time.monotonic(), timeout_s)
        self._notifier.stopping("draining")
        _log.info("draining", timeout_s=timeout_s or self._config.drain_timeout_s)

    def cancel_orphans_of(self, scope: str) -> None:
        """End the sessions of a client that vanished, and then said goodbye after all."""
        for stream in self._orphans:
            if stream.key.client == scope:
                self._orphans[stream] = 0.0

    # ---- timers

    def _on_time(self, now: float) -> None:
        if (self._signals.count or self._signals.orphaned) and not self._drain.draining:
            self.begin_drain(None)
        deserted = self._signals.orphaned and not self._scheduler.ready  # nobody will start another worker
        if (self._signals.count > 1 or deserted) and not self._drain.forced:
            self._drain.force(now)
        self._crew.watch(now)
        self._delivery.take(self._scheduler.expire(now), now)
        self._lose_clients(self._connections.probe(now))
        self._cancel_orphans(now)
        self._library.expire(now)
        if now >= self._next_positions:
            self._next_positions = now + _POSITIONS_S
            self._delivery.tell_positions()
        if self._watchdog_s and now >= self._next_watchdog:
            self._next_watchdog = now + self._watchdog_s
            self._notifier.watchdog()

    def _wait_ms(self, now: float) -> int:
        wait = _BLOCKED_WAIT_S if self._connections.blocked() else _IDLE_WAIT_S
        for due in (self._scheduler.next_deadline(), self._scheduler.next_plan()):
            if due is not None:
                wait = min(wait, max(0.0, due - now))
        return int(wait * 1000) + 1

    def _attend(self, now: float) -> None:
        """Move on the clocks of patience, with clients and with the worker. They run only while this process does: one
        that was stopped, or whose machine slept, must listen first to those who could not reach it.
        """
        turn_s = now - self._attended_at
        attended_s = min(turn_s, _LONGEST_TURN_S)
        self._attended_s += attended_s
        self._attended_at = now
        if turn_s > attended_s:
            self._crew.excuse(turn_s - attended_s)

    def _lose_clients(self, gone: list[Connection]) -> None:
        """Their sessions run on for a while: whoever comes back with the key finds them."""
        for connection in gone:
            for stream in self._connections.close(connection):
                self._orphans[stream] = self._attended_s + self._config.orphan_timeout_s

    def _cancel_orphans(self, now: float) -> None:
        for stream, at in list(self._orphans.items()):
            if stream.reader is not None or stream.done is not None:
                del self._orphans[stream]
            elif at <= self._attended_s:
                del self._orphans[stream]
                self._delivery.take(self._scheduler.cancel(stream.key, now, detail="client gone"), now)

    def _publish(self, now: float) -> None:
        worker = self._status.worker(self._drain.draining)
        if worker != self._last_worker:
            self._last_worker = worker
            self._publisher.publish("worker", worker)
        if now >= self._next_snapshot:
            self._next_snapshot = now + self._config.telemetry_interval_s
            extra = {"ready": worker["ready"], "exact": worker["exact"], "kv_drift_rows": self._scheduler.kv_drift_rows}
            self._publisher.publish("snapshot", extra | self._scheduler.telemetry(now).to_dict())

    def _stop_step(self, now: float) -> None:
        before = self._drain.phase
        phase = self._drain.step(now, self._scheduler.idle, not self._connections.blocked())
        if phase is Phase.CANCELLING and before is Phase.DRAINING:
            for session in self._scheduler.sessions():
                self._delivery.take(self._scheduler.cancel(session.key, now, detail="draining"), now)
            self._crew.schedule(now)  # the releases that this makes due
            self._lose_clients(self._connections.flush(now))

    # ---- building and closing

    def _build(self, tokenizer: Tokenizer, tick_log: TickLog | None, sharing: PrefixSharing) -> None:
        config = self._config
        facts = expected_facts(config, tokenizer)
        check_serves(config, facts)
        self._scheduler = make_scheduler(derive_budget(config, facts), facts, config.tick_depth, tick_log)
        self._library = StreamLibrary(config.result_ttl_s)
        self._connections = Connections()
        self._status = Status(config, self._scheduler, self._link, self.boot_id, tokenizer.name)
        self._delivery = Delivery(
            self._scheduler, self._library, self._connections, self._publisher, lambda: self._status.exact
        )
        self._crew = Crew(
            config,
            self._link,
            self._scheduler,
            self._library,
            self._delivery,
            self._publisher,
            tokenizer.fingerprint,
        )
        self._submissions = Submissions(
            self._scheduler,
            Intake(config, tokenizer, ChatTemplate(tokenizer, config.chat_template), sharing),
            self._library,
            self._connections,
            self._publisher,
            self._side,
            tokenizer,
            max_unread_tokens=config.max_unread_tokens,
            resume_grace_s=config.resume_grace_s,
            unavailable=self._unavailable,
        )
        shared = (self, self._scheduler, self._library, self._connections, self._submissions, self._delivery)
        self._client_desk = Desk(self._clients, False, *shared)
        self._control_desk = Desk(self._control, True, *shared)

    def _unavailable(self) -> str:
        """Why nothing is admitted although the node is not draining; empty while a worker serves or may come."""
        if self._scheduler.ready:
            return ""
        patience = _NO_WORKER_S if self._link.peer is None else self._config.load_timeout_s
        waited = time.monotonic() - self._crew.lost_at
        return f"{self._status.reason(False)} for {waited:.0f} s" if waited > patience else ""

    def _odd_counts(self) -> dict[str, int]:
        """Counters that stay 0 on a node nobody abuses."""
        return {
            "malformed_from_clients": self._client_desk.malformed + self._control_desk.malformed,
            "malformed_from_workers": self._link.malformed,
            "strangers": self._link.strangers,
            "stale_results": self._scheduler.stale_results,
            "bad_replay_queries": self._publisher.bad_queries,
            "bad_subscriptions": self._publisher.bad_subscriptions,
        }

    def _router(self, endpoint: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.ROUTER)
        socket.set(zmq.LINGER, 200)  # milliseconds for last messages to leave
        socket.set(zmq.ROUTER_MANDATORY, 1)
        socket.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        socket.set(zmq.SNDHWM, _CLIENT_HWM)
        socket.set(zmq.BACKLOG, _CLIENT_BACKLOG)
        socket.set(zmq.HEARTBEAT_IVL, 2000)
        socket.set(zmq.HEARTBEAT_TIMEOUT, 5000)
        socket.bind(endpoint)
        return socket

    def _make_poller(self) -> zmq.Poller:
        poller = zmq.Poller()
        for socket in (self._clients, self._control, *self._link.sockets, *self._publisher.sockets):
            poller.register(socket, zmq.POLLIN)
        poller.register(self._signals.fileno(), zmq.POLLIN)
        poller.register(self._side.fileno(), zmq.POLLIN)
        return poller

    def _close(self) -> None:
        self._side.close()
        self._signals.close()
        self._link.close()
        self._publisher.close()
        self._clients.close()
        self._control.close()
        self._context.term()
        self._notifier.close()
