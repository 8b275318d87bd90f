"""The scheduler: admission, continuous batching, recovery. Events in, decisions out.

Pure: no sockets, threads, clocks, logging or token values in here. ``now`` is a parameter, in seconds on any
clock that does not run backwards; a token is a number passed through from a result to its event.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from treadle_broker.admission import Admission
from treadle_broker.cadence import Cadence
from treadle_broker.coalescing import Coalescing
from treadle_broker.counters import Counters
from treadle_broker.deadlines import Deadlines
from treadle_broker.first_token import FirstTokenEstimate
from treadle_broker.inflight import InFlight, Sent
from treadle_broker.marks import Marks
from treadle_broker.moves import Moves
from treadle_broker.pace import PrefillPace
from treadle_broker.plan import Event, Finished, Plan, PlannedDecode, PlannedPrefill, Promoted
from treadle_broker.planner import Planner, Row
from treadle_broker.retry import RetryEstimator
from treadle_broker.roster import Roster
from treadle_broker.session import Job, Session, SessionKey, State
from treadle_broker.settlement import Settlement
from treadle_broker.telemetry import snapshot
from treadle_broker.timing import Timing
from treadle_shared.admission import AdmissionDecision
from treadle_shared.budget import NodeBudget
from treadle_shared.engine import EngineFacts
from treadle_shared.outcome import DoneReason
from treadle_shared.telemetry import SchedulerTelemetry
from treadle_shared.ticks import TickResult


class Scheduler:
    """One node's sessions and what runs next.

    ``depth`` 2 plans a tick while another one runs, and several where ``coalesce_ms`` lets their answers leave
    together; 1 is lockstep. ``recover_misses``: a session whose KV was evicted is rebuilt; otherwise it ends with
    ``CACHE_MISS``. ``eager`` plans whatever is due at once, never putting it off. Nothing is planned before
    ``worker_ready``.
    """

    def __init__(
        self,
        budget: NodeBudget,
        facts: EngineFacts,
        *,
        depth: int = 2,
        recover_misses: bool = True,
        eager: bool = False,
    ) -> None:
        self._roster = Roster(budget, facts)
        self._counters = Counters()
        self._retry = RetryEstimator()
        self._retry.seed(facts.decode_tick_s)
        self._pace = PrefillPace()
        self._pace.seed(facts.decode_tick_s, facts.prefill_tokens_per_s)
        self._planner = Planner(self._roster, self._pace)
        estimate = FirstTokenEstimate(self._roster, self._planner, self._pace)
        self._admission = Admission(self._roster, self._counters, self._retry, estimate)
        self._inflight = InFlight(depth)
        self._settlement = Settlement(
            self._roster, self._inflight, self._counters, self._finish, recover_misses=recover_misses
        )
        self._coalescing = Coalescing(self._roster, self._pace, self._inflight)
        self._timing = Timing(self._roster, self._planner, self._pace, self._inflight)
        self._eager = eager
        self._deadlines = Deadlines()
        self._promoted: list[Event] = []
        self._ready = False
        self._resync = False
        self._next_tick = 0
        self._cadence = Cadence()
        self._next_plan: float | None = None
        self._kv_drift = 0

    # ---- submissions and ends

    def submit(self, jobs: Sequence[Job], now: float) -> list[AdmissionDecision]:
        """Decide on jobs submitted together: all are accepted or none; one decision each, in order."""
        accepted, decisions = self._admission.submit(jobs, now)
        for session in accepted:
            self._deadlines.watch(session)
            session.bind(self._roster.facts.recipe_fingerprint)
            if self._ready and session.is_of_another(self._roster.facts.recipe_fingerprint):
                self._promoted.append(self._finish(session, DoneReason.FAILED, "recipe_changed"))
            elif session.emitted >= session.job.max_new_tokens:  # resumed, and only its end was missing
                self._promoted.append(self._finish(session, DoneReason.LENGTH, ""))
            elif session.state is not State.QUEUED:
                self._promoted.append(Promoted(session.key, 0.0))
        self._deadlines.compact(len(self._roster.sessions))
        return decisions

    def full_refusal(self, client: str, session_id: str, prompt_tokens: int, now: float) -> AdmissionDecision | None:
        """The refusal that a client's job of at least ``prompt_tokens`` would meet now (queue full, draining), or None.

        Not counted: pass it to ``refuse``. Cheap, so that a burst is turned away before anything is tokenised.
        """
        return self._admission.full_refusal(client, session_id, prompt_tokens, now)

    def refuse(self, decision: AdmissionDecision) -> AdmissionDecision:
        """Count a refusal that was decided outside (invalid, quota, unavailable, full)."""
        assert not decision.accepted
        self._counters.reject(decision.reason)
        return decision

    def find(self, client: str, session_id: str) -> SessionKey | None:
        """The live session of exactly that client and id."""
        return self._admission.current(client, session_id)

    def drain(self) -> None:
        """Refuse every further submission; what was accepted runs on."""
        self._admission.draining = True

    def cancel(
        self, key: SessionKey, now: float, reason: DoneReason = DoneReason.CANCELLED, detail: str = ""
    ) -> list[Event]:
        """End a session in any state; an unknown or ended one is no error and no event."""
        session = self._roster.sessions.get(key)
        return [] if session is None else [self._finish(session, reason, detail)]

    def stop(self, key: SessionKey, n_tokens: int, reason: DoneReason, now: float, detail: str = "") -> list[Event]:
        """The answer is complete after ``n_tokens`` tokens (a stop string); rows in flight are run and dropped."""
        session = self._roster.sessions.get(key)
        return [] if session is None else [self._finish(session, reason, detail, n_tokens)]

    def extend(self, key: SessionKey, digests: bytes) -> None:
        """With its emitted tokens a session has filled more blocks: their digests, in the order of its ``Job.prefix``,
        which they go on from. An unknown or ended one is no error.
        """
        session = self._roster.sessions.get(key)
        if session is not None:
            session.chain += digests
            self._roster.prefixes.grown(session)

    def expire(self, now: float) -> list[Event]:
        """End every session whose queue timeout or deadline has passed."""
        return [self._finish(session, DoneReason.DEADLINE, bound) for session, bound in self._deadlines.due(now)]

    def next_deadline(self) -> float | None:
        """When ``expire`` next has something to do."""
        return self._deadlines.next()

    def positions(self) -> Iterator[tuple[SessionKey, int]]:
        """Every queued session with the number of sessions ahead of it. Costs the queue's length."""
        return ((session.key, ahead) for ahead, session in enumerate(self._roster.queue.in_order()))

    def _finish(self, session: Session, reason: DoneReason, detail: str, tokens: int | None = None) -> Finished:
        self._roster.end(session)
        self._admission.forget(session)
        self._counters.end(reason)
        emitted = session.emitted if tokens is None else tokens
        return Finished(session.key, reason, detail, emitted, min(session.cached or 0, session.job.prompt_tokens))

    # ---- ticks

    def plan(self, now: float) -> Plan | None:
        """The next tick, or None: the engine is not ready, enough ticks are in flight, nothing is due, or it is better
        planned later (``next_plan``).
        """
        self._next_plan = None
        if not self._ready or self._inflight.full(self._coalescing.ahead):
            return None
        later = self._put_off(self._timing.plan_at(self._cadence.answered_at), now)
        if not later:
            self._roster.turns.make_room()
        self._promote(now)
        if later:
            return None
        self._roster.turns.swap()
        moves = self._roster.take_moves()
        crowded = self._roster.suspects.crowded(self._inflight.running())
        decode = [] if crowded else self._planner.decodes()
        waits = crowded or (not self._admission.draining and self._put_off(self._timing.prefill_at(), now))
        prefill = [] if waits else self._planner.prefills(len(decode))
        if not (moves.any or decode or prefill):
            return None
        hold = not (moves.any or prefill) and self._coalescing.holds(decode)
        return self._send(moves, decode, prefill, hold, now)

    def _promote(self, now: float) -> None:
        """Whoever fits leaves the queue, also while a tick is put off."""
        while (session := self._roster.next_to_promote()) is not None:
            self._roster.promote(session, now)
            self._promoted.append(Promoted(session.key, now - session.submitted_at))

    def _put_off(self, until: float | None, now: float) -> bool:
        if self._eager or until is None or now >= until:
            return False
        self._next_plan = until
        return True

    def next_plan(self) -> float | None:
        """When ``plan``, which has just put it off, is to be called again, unless something happens before."""
        return self._next_plan

    def take_promoted(self) -> list[Event]:
        """Promotions by ``submit`` and ``plan`` since the last call, of sessions that are still live; and the ends
        of resumed sessions that had nothing left to generate, or were begun with another recipe.
        """
        promoted, self._promoted = self._promoted, []
        live = self._roster.sessions
        return [event for event in promoted if isinstance(event, Finished) or event.key in live]

    def complete(self, result: TickResult, now: float) -> list[Event]:
        """Take one part of a tick's answer; an answer to anything but the oldest tick in flight is dropped."""
        sent = self._inflight.oldest
        if sent is None or sent.plan.tick_id != result.tick_id:
            self._counters.stale_results += 1
            return []
        events: list[Event] = []
        if not sent.void and not result.not_run:
            self._roster.parking.answered(sent.plan, result.unparked)
            self._roster.parking.engine_bytes = result.parked_bytes
        if not sent.void and result.error:
            self._resync = True
            events = list(self._settlement.failed(sent, result))
        elif not sent.void:
            events = self._settlement.ran(sent, result, now)
            self._measure(sent, result)
        if result.last:
            events += self._settlement.closed(sent)
            self._retire(result, now)
        return events

    def _measure(self, sent: Sent, result: TickResult) -> None:
        if result.part == 1:
            self._pace.prefilled(sent.plan.prefill_tokens, result.timings.total_s)
        elif sent.plan.decode and result.rows:  # rows that were all skipped took no time
            self._pace.decoded(result.timings.total_s)

    def overtaken(self, result: TickResult) -> bool:
        """Whether a later tick in flight is answered before the oldest one is: that answer will not come any more."""
        return any(sent.plan.tick_id == result.tick_id for sent in self._inflight.after_oldest())

    @property
    def awaits_answer(self) -> bool:
        """Whether a tick is in flight."""
        return len(self._inflight) > 0

    def _send(self, moves: Moves, decode: list[Row], prefill: list[Row], hold: bool, now: float) -> Plan:
        plan = Plan(
            self._next_tick,
            self._resync,
            moves.release,
            tuple(row for row, _ in decode if isinstance(row, PlannedDecode)),
            tuple(row for row, _ in prefill if isinstance(row, PlannedPrefill)),
            moves.park,
            moves.restore,
            moves.discard,
            moves.keep,
            hold,
        )
        self._next_tick += 1
        self._resync = False
        physical = self._roster.slots.physical_rows
        for _, session in chain(decode, prefill):
            if session.leaving:  # LENGTH is known now: the next tick may refill the slot
                self._roster.leave(session)
        open_rows = {(row.slot, row.gen): (row, session) for row, session in chain(decode, prefill)}
        self._inflight.push(Sent(plan, now, self._roster.ledger.live_rows, physical, open_rows))
        return plan

    def _retire(self, result: TickResult, now: float) -> None:
        sent = self._inflight.retire()
        if sent.void:
            self._cadence.begin_anew()
            return
        self._kv_drift = result.kv_tokens - sent.physical_rows
        more = sent.plan.hold and self.awaits_answer
        took_s = self._cadence.answered(sent.sent_at, now, runs=sent.plan.runs, more=more)
        if sent.plan.runs:
            self._counters.closed(sent.kv_rows)
        if took_s is not None:
            self._retry.observe(took_s)

    # ---- the worker

    def worker_ready(self, facts: EngineFacts, now: float, budget: NodeBudget | None = None) -> list[Event]:
        """An empty engine is there; ``budget`` replaces the one derived before its facts were known.

        Sessions that have emitted tokens of another recipe end, and waiting ones that can no longer fit.
        """
        roster = self._roster
        roster.facts = facts
        roster.budget = budget or roster.budget
        self._retry.seed(facts.decode_tick_s)
        self._pace.seed(facts.decode_tick_s, facts.prefill_tokens_per_s)
        self._ready = True
        events: list[Event] = []
        for session in list(roster.sessions.values()):
            if session.is_of_another(facts.recipe_fingerprint):
                events.append(self._finish(session, DoneReason.FAILED, "recipe_changed"))
            elif not roster.can_ever_fit(session):
                events.append(self._finish(session, DoneReason.FAILED, "does_not_fit"))
            else:
                session.bind(facts.recipe_fingerprint)
        roster.reseat()
        return events

    def worker_lost(self, now: float, why: str = "worker lost") -> list[Event]:
        """The engine is gone, with every tick in flight; sessions that ran are rebuilt on the next one."""
        self._ready = False
        self._resync = False
        self._kv_drift = 0
        dropped = self._inflight.drop_all()
        self._cadence.begin_anew()
        in_ticks = dict.fromkeys(session for sent in dropped if not sent.void for session in sent.unanswered())
        active = [session for session in self._roster.sessions.values() if session.active]
        bystanders = [session for session in active if session not in in_ticks]
        events = list(self._settlement.lost(list(in_ticks), why))
        events += self._settlement.restart(bystanders, why)
        self._roster.forget_engine()
        return events

    @property
    def ready(self) -> bool:
        """Whether an engine is there."""
        return self._ready

    @property
    def idle(self) -> bool:
        """Whether no session is live and no tick is in flight."""
        return not self._roster.sessions and not len(self._inflight)

    # ---- going on elsewhere

    @property
    def at_rest(self) -> bool:
        """Whether it is idle and owes the engine nothing: ``marks`` is then all that its past can decide."""
        return self.idle and not self._roster.moves_due

    def marks(self) -> Marks:
        """What a fresh scheduler must remember to go on as this one, which is at rest."""
        assert not self._resync  # a failed tick leaves a slot to release
        floor, epochs = self._admission.epochs.memory()
        return Marks(
            next_tick=self._next_tick,
            next_gen=self._roster.slots.next_gen,
            kv_drift=self._kv_drift,
            last_result_at=self._cadence.answered_at,
            tick_s=self._retry.measured_tick_s,
            pace=self._pace.marks,
            epoch_floor=floor,
            epochs=epochs,
            kept=self._roster.prefixes.memory(),
        )

    def remember(self, marks: Marks) -> None:
        """Go on from another scheduler's marks, before anything was submitted."""
        self._next_tick = marks.next_tick
        self._roster.slots.next_gen = marks.next_gen
        self._kv_drift = marks.kv_drift
        self._cadence.answered_at = marks.last_result_at
        self._retry.remember(marks.tick_s)
        self._pace.remember(marks.pace)
        self._admission.epochs.remember(marks.epoch_floor, marks.epochs)
        self._roster.prefixes.remember(marks.kept)

    # ---- facts

    @property
    def facts(self) -> EngineFacts:
        """What is known of the engine."""
        return self._roster.facts

    def sessions(self) -> list[Session]:
        """Every live session, to be read only."""
        return list(self._roster.sessions.values())

    @property
    def kv_drift_rows(self) -> int:
        """KV rows the engine reported beyond the ledger at the last completed tick; 0 unless one of them is wrong."""
        return self._kv_drift

    @property
    def kv_rows_peak(self) -> int:
        """The most live KV rows at the end of any tick."""
        return self._counters.kv_rows_peak

    @property
    def cache_misses(self) -> int:
        """Rows whose KV had been evicted."""
        return self._counters.cache_misses

    @property
    def stale_results(self) -> int:
        """Answers and rows that matched no tick in flight."""
        return self._counters.stale_results

    def telemetry(self, now: float) -> SchedulerTelemetry:
        """One consistent snapshot."""
        return snapshot(self._roster, self._counters, now)

    def check(self) -> None:
        """Raise AssertionError where an invariant is broken. Costs the number of live sessions."""
        self._roster.check()
        counters = self._counters
        assert counters.submitted == len(self._roster.sessions) + counters.settled
        if self.idle and not self._roster.moves_due:
            assert self._roster.ledger.reserved == 0
            assert self._roster.parking.bytes_held == 0
            assert self._roster.slots.physical_rows == self._roster.prefixes.rows
