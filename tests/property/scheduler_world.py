"""A scheduler and a worker that runs its ticks, with every message between them under control."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import msgspec
from clientele import Clientele, Wish
from hash_engine import HashEngine, Poison, WorkerDied

from treadle_broker.plan import Event, Finished, Plan, Promoted
from treadle_broker.scheduler import Scheduler
from treadle_broker.session import DIGEST_BYTES, Session, SessionKey
from treadle_broker.tick_builder import build_tick
from treadle_shared.admission import AdmissionDecision
from treadle_shared.budget import NodeBudget
from treadle_shared.codec import decode_from_worker, decode_to_worker, encode
from treadle_shared.engine import EngineFacts
from treadle_shared.limits import MAX_TOGETHER
from treadle_shared.outcome import DoneReason
from treadle_shared.runner import TickRunner
from treadle_shared.ticks import Tick, TickResult

_LONGEST_WAIT_S = 1.0  # the longest tick of these worlds is not longer
_MAX_LATE = 8  # results of lost workers that are kept to arrive late


class World:
    """Drives a Scheduler over a TickRunner one message at a time and judges every plan, result and event.

    Ticks and results cross as bytes, and each stays under way until told to move. ``deaths`` counts lost workers,
    ``faults`` also failed batches, refused ticks and rows that were not answered. Until the first worker is there, the
    scheduler knows neither its recipe nor how it wants emitted tokens back.
    """

    def __init__(
        self,
        budget: NodeBudget,
        facts: EngineFacts,
        depth: int,
        *,
        recover_misses: bool = True,
        poison: Poison | None = None,
    ) -> None:
        guess = msgspec.structs.replace(facts, recipe_fingerprint="", min_prefill_rows=1, replay_decode=False)
        self.scheduler = Scheduler(budget, guess, depth=depth, recover_misses=recover_misses)
        self.clients = Clientele(self.scheduler, budget, facts)
        self.now = 0.0
        self.depth = depth
        self.deaths = 0
        self.faults = 0
        self.ticks_run = 0
        self.copied_rows = 0
        self.copied_answers = 0
        self.worker_up = False
        self.worker_known = False
        self.late: list[TickResult] = []
        self._carried = 0  # active sessions that a budget took over from another one, which may have allowed more
        self._poison = poison
        self._errors_possible = poison is not None
        self._to_worker: deque[bytes] = deque()
        self._to_broker: deque[bytes] = deque()
        self._running: Iterator[TickResult] | None = None
        self._unanswered: set[int] = set()
        self._tampered: set[int] = set()
        self._holed: set[int] = set()
        self._inexact: set[int] = set()
        self.engine = HashEngine(facts, poison)
        self.runner = TickRunner(self.engine, clock=lambda: self.engine.busy_s)

    @property
    def budget(self) -> NodeBudget:
        """The budget that holds now."""
        return self.clients.budget

    @property
    def facts(self) -> EngineFacts:
        """The engine that runs now, or ran last."""
        return self.clients.facts

    # ---- clients

    def submit(self, wishes: Sequence[Wish]) -> list[AdmissionDecision]:
        """Submit jobs together."""
        return self.clients.submit(wishes, self.now)

    def cancel(self, key: SessionKey) -> None:
        """Cancel by exact key; only a live session answers."""
        client = self.clients.sessions.get(key)
        live = client is not None and client.ended is None
        if client is not None:
            client.may_end.add((DoneReason.CANCELLED, "gone"))
        events = self.scheduler.cancel(key, self.now, detail="gone")
        assert [type(event) for event in events] == ([Finished] if live else [])
        self.clients.observe(events)

    def stop(self, key: SessionKey, cut: int) -> None:
        """A stop string was found ``cut`` tokens before the end of what was emitted."""
        client = self.clients.sessions[key]
        n_tokens = max(0, len(client.tokens) - cut)
        client.may_end.add((DoneReason.STOP, "stop"))
        events = self.scheduler.stop(key, n_tokens, DoneReason.STOP, self.now, "stop")
        assert [type(event) for event in events] == ([Finished] if client.ended is None else [])
        if events:
            client.sequence = client.sequence[: len(client.wish.prompt) + n_tokens]
        self.clients.observe(events)

    def advance(self, seconds: float) -> None:
        """Move the clock and end whoever is out of time."""
        self.now += seconds
        overdue = self.clients.overdue(self.now)
        self.clients.observe(self.scheduler.expire(self.now))
        assert all(self.clients.sessions[key].ended is not None for key in overdue)
        assert self.scheduler.next_deadline() == self.clients.next_deadline()

    def drain(self) -> None:
        """Take no more sessions."""
        self.clients.draining = True
        self.scheduler.drain()

    # ---- one tick's way

    def plan(self) -> bool:
        """Ask for a tick and send it; False where there is none."""
        line = [key for key, _ in self.scheduler.positions()]
        seated = self._seated()
        wanting = [session for session in seated if session.wants_decode]
        prefilling = any(session.prefill_left > 0 for session in seated)
        plan = self.scheduler.plan(self.now)
        self._check_promotions(self.scheduler.take_promoted(), line)
        if plan is None:
            return False
        assert self.worker_up
        self._check_plan(plan)
        if self.scheduler._roster.suspects._suspects:
            for _, client in self.clients.live():
                client.paused = 0
        else:
            self._check_policy(plan, wanting, prefilling)
            self._check_turns(plan)
        self._unanswered.add(plan.tick_id)
        self._check_hold(plan)
        self._to_worker.append(encode(build_tick(plan, "broker", "worker", self.clients.sessions.__getitem__)))
        return True

    def _seated(self) -> list[Session]:
        return self.scheduler._roster.slots.sessions()

    def _check_promotions(self, events: list[Event], line: list[SessionKey]) -> None:
        """In the queue's order, after those that lost their slot."""
        assert all(isinstance(event, Promoted) for event in events)
        self.clients.observe(events)
        from_queue = [event.key for event in events if event.key in line]
        assert from_queue == line[: len(from_queue)], "somebody overtook the head of the queue"
        roster = self.scheduler._roster
        overtaken = roster._returning and not self.budget.takes_turns
        assert not from_queue or not overtaken, "a session that lost its slot was overtaken"

    def _check_plan(self, plan: Plan) -> None:
        budget, rows = self.budget, [*plan.decode, *plan.prefill]
        slots = [row.slot for row in rows]
        assert len(slots) == len(set(slots))
        assert all(slot < self._places for slot in slots)
        assert [row.slot for row in plan.decode] == sorted(row.slot for row in plan.decode)
        assert len(plan.decode) <= budget.max_batch_size
        burst = budget.burst_prefill_tokens_per_tick
        cap = max(budget.max_prefill_tokens_per_tick, burst if plan.decode else 4 * burst)
        min_rows = self.facts.min_prefill_rows
        alone = len(plan.prefill) == 1 and plan.prefill_tokens <= max(cap, 2 * min_rows - 1)
        assert plan.prefill_tokens <= cap or alone
        assert all(self.clients.sessions[row.key].ended is None for row in rows), "a row for a session that ended"
        self._check_copies(plan)

    def _check_hold(self, plan: Plan) -> None:
        """What leaves together is bounded, and keeps nobody from a first or a last token."""
        if not plan.hold:
            return
        assert self.budget.coalesce_ms
        assert self.depth > 1
        assert plan.decode
        assert not any((plan.prefill, plan.release, plan.park, plan.restore, plan.discard, plan.keep))
        assert all(session.prefill_left <= 0 for session in self._seated())
        assert not self.scheduler._roster.anyone_waits
        for row in plan.decode:
            client = self.clients.sessions[row.key]
            assert row.pos + 2 < client.job.need_tokens, "the last token waits"

    def _check_copies(self, plan: Plan) -> None:
        """Beginnings are copied by whole blocks, and enough is left to run; where emitted tokens have rows of their own
        kind, those of prompts alone.
        """
        block, places = self.budget.prefix_block_tokens, self._places
        assert len({row.slot for row in plan.keep}) == len(plan.keep) <= self.cache_slots
        assert all(places <= row.slot < places + self.cache_slots for row in plan.keep)
        assert not plan.copy or self.cache_slots
        for row in [*plan.keep, *plan.copy]:
            assert row.rows > 0
            assert row.rows % block == 0
        for row in plan.copy:
            assert row.key is not None
            client = self.clients.sessions[row.key]
            assert client.wish.shared
            assert row.rows <= len(client.job.prefix) // DIGEST_BYTES * block or not self.facts.replay_decode
            assert row.rows + self.facts.min_prefill_rows <= len(client.sequence)
            self.copied_rows += row.rows
            self.copied_answers += 0 < client.wish.asked < row.rows

    @property
    def _most_in_flight(self) -> int:
        """Ticks, whose answers may leave together under this budget or one before."""
        return self.depth * MAX_TOGETHER if self.depth > 1 else 1

    @property
    def cache_slots(self) -> int:
        """Sequences beside those of sessions."""
        return min(self.budget.cache_slots, self.facts.max_sequences - self._places) if self.facts.can_copy else 0

    def _check_policy(self, plan: Plan, wanting: list[Session], prefilling: bool) -> None:
        """Decode first, nobody left out for long but for the batch bound, and one prompt always moves."""
        decoding = {row.key for row in plan.decode}
        roster = self.scheduler._roster
        left_out = [
            session
            for session in wanting
            if session.live and session.key not in decoding and session.slot is not None
            if roster.turns.has_room(session)
        ]
        assert not left_out or len(plan.decode) == self.budget.max_batch_size
        assert not prefilling or plan.prefill or self._put_off()
        for session in self._seated():
            client = self.clients.sessions[session.key]
            client.waited = client.waited + 1 if session in left_out else 0
            assert client.waited <= -(-self.budget.max_active // self.budget.max_batch_size), "a session starves"

    def _put_off(self) -> bool:
        """Whether the scheduler says when it will go on; that is soon."""
        again = self.scheduler.next_plan()
        assert again is None or self.now < again < self.now + _LONGEST_WAIT_S
        return again is not None

    def _check_turns(self, plan: Plan) -> None:
        """Nobody who left the queue waits for more than everybody else's turn, one after the other."""
        budget = self.budget
        rows = {row.key for row in (*plan.decode, *plan.prefill)}
        active = [self.clients.sessions[s.key] for s in self.scheduler.sessions() if s.active]
        share = -(-budget.max_active // budget.max_batch_size)
        bound = sum(2 * client.job.need_tokens + share * (budget.slice_tokens + 4) for client in active)
        for session in self.scheduler.sessions():
            client = self.clients.sessions[session.key]
            paused = session.active and not session.leaving and session.key not in rows and plan.runs
            client.paused = client.paused + 1 if paused else 0
            assert client.paused <= bound or not budget.takes_turns, "a session is never given a turn"

    @property
    def _places(self) -> int:
        return max(0, min(self.budget.seats, self.facts.max_sequences))

    def work(self) -> bool:
        """Let the worker come up with its next result part; False where it has nothing to do."""
        if self._running is None:
            if not self._to_worker:
                return False
            tick = decode_to_worker(self._to_worker.popleft())
            assert isinstance(tick, Tick)
            self._running = self.runner.run(tick)
            self.ticks_run += bool(tick.decode or tick.prefill)
        try:
            part = next(self._running, None)
        except WorkerDied:
            self.lose_worker(late_results=False)
            return True
        if part is None:
            self._running = None
            return self.work()
        self._check_part(part)
        self._to_broker.append(encode(part))
        return True

    def _check_part(self, part: TickResult) -> None:
        if part.not_run and part.error_code:
            assert part.tick_id in self._tampered, f"the runner refused a tick: {part.error}"
        assert not part.error or self._errors_possible, "an error out of nothing"
        assert self.engine.sequences <= self._places + self.cache_slots
        assert part.parked_bytes == self.engine.parked_bytes <= self.scheduler._roster.parking.bytes_held
        assert self.engine.parked_bytes <= self.budget.park_bytes
        if self.engine.missing:
            self._inexact.add(part.tick_id)
        if not self._errors_possible:
            self.runner.check()
            assert self.engine.kv_tokens * self.facts.kv_bytes_per_token <= self.budget.kv_bytes

    def deliver(self) -> bool:
        """Bring the next result part to the scheduler; False where none is under way."""
        if not self._to_broker:
            return False
        part = decode_from_worker(self._to_broker.popleft())
        assert isinstance(part, TickResult)
        if part.error_code or (part.last and part.tick_id in self._holed):
            self._fault()
        self.clients.observe(self.scheduler.complete(part, self.now))
        if part.last:
            self._unanswered.discard(part.tick_id)
            assert part.error or part.tick_id in self._inexact or self.scheduler.kv_drift_rows == 0
        return True

    def deliver_late(self, choice: int) -> None:
        """A result of a lost worker arrives, and changes nothing."""
        stale = self.scheduler.stale_results
        part = self.late.pop(choice % len(self.late))
        assert self.scheduler.complete(part, self.now) == []
        assert self.scheduler.stale_results == stale + 1

    def turn(self) -> bool:
        """Plan what can be planned, run one tick, bring its results back; False where nothing moved."""
        moved = False
        while self.plan():
            moved = True
        again = self.scheduler.next_plan()
        if again is not None and not (moved or self._unanswered):
            self.advance(again - self.now)
            moved = self.plan()
        while self.work():
            moved = True
            if self._running is None or _closes_tick(self._to_broker):
                break
        while self.deliver():
            moved = True
        return moved

    # ---- faults

    def fail_next_batch(self, code: int, prefill: bool) -> None:
        """The next decode (or prefill) batch fails."""
        self._errors_possible = True
        if prefill:
            self.engine.fail_prefill = code
        else:
            self.engine.fail_decode = code

    def fail_next_move(self, restore: bool) -> None:
        """The next sequence cannot be parked, or its state is lost when it is wanted back."""
        if restore:
            self.engine.fail_restore = True
            self.clients.misses_possible = True
        else:
            self.engine.fail_park = True

    def evict(self, choice: int) -> None:
        """One sequence's KV is gone."""
        self.clients.misses_possible |= self.engine.evict(choice)

    def tamper(self) -> None:
        """The newest tick under way is spoiled: the runner must refuse it whole."""
        tick = decode_to_worker(self._to_worker[-1]) if self._to_worker else None
        if not isinstance(tick, Tick) or not tick.decode:
            return
        row = msgspec.structs.replace(tick.decode[0], gen=tick.decode[0].gen + 1_000_000)
        self._to_worker[-1] = encode(msgspec.structs.replace(tick, decode=[row, *tick.decode[1:]]))
        self._tampered.add(tick.tick_id)
        self._errors_possible = True

    def forget_row(self, choice: int) -> None:
        """The newest result under way does not answer one of its rows, as only a broken worker would do."""
        part = decode_from_worker(self._to_broker[-1]) if self._to_broker else None
        if not isinstance(part, TickResult) or not part.rows:
            return
        gone = choice % len(part.rows)
        rows = [row for number, row in enumerate(part.rows) if number != gone]
        self._to_broker[-1] = encode(msgspec.structs.replace(part, rows=rows))
        self._holed.add(part.tick_id)
        self._errors_possible = True

    def lose_worker(self, late_results: bool) -> None:
        """The worker dies with every tick under way; what it had sent may still arrive."""
        parts = [decode_from_worker(data) for data in self._to_broker]
        if late_results:
            self.late += [part for part in parts if isinstance(part, TickResult)][: _MAX_LATE - len(self.late)]
        self._to_worker.clear()
        self._to_broker.clear()
        self._unanswered.clear()
        self._running = None
        self.worker_up = False
        self.deaths += 1
        self._fault()
        self.clients.observe(self.scheduler.worker_lost(self.now))
        assert not self.scheduler.ready
        assert self.scheduler.plan(self.now) is None

    def _fault(self) -> None:
        self.faults += 1
        self.clients.fault()

    def start_worker(self, facts: EngineFacts | None = None, budget: NodeBudget | None = None) -> None:
        """A fresh worker, perhaps of another recipe, perhaps under another budget."""
        clients, before = self.clients, self.facts
        clients.facts, clients.budget = facts or self.facts, budget or self.budget
        self._carried = sum(session.active for session in self.scheduler.sessions())
        self.engine = HashEngine(self.facts, self._poison)
        self.runner = TickRunner(self.engine, clock=lambda: self.engine.busy_s)
        self._errors_possible = self._poison is not None
        self.worker_up = self.worker_known = True
        doomed = []
        for _, client in clients.live():
            if before.recipe_fingerprint != self.facts.recipe_fingerprint and client.tokens:
                client.may_end.add((DoneReason.FAILED, "recipe_changed"))
                doomed.append(client)
            elif not clients.can_ever_fit(client.job):
                client.may_end.add((DoneReason.FAILED, "does_not_fit"))
                doomed.append(client)
        clients.observe(self.scheduler.worker_ready(self.facts, self.now, budget))
        assert all(client.ended is not None for client in doomed)
        assert self.scheduler.ready

    # ---- judging

    def check(self) -> None:
        """Everything that must hold at any time."""
        self.scheduler.check()
        self.clients.check(self.now)
        budget, seated = self.budget, self._seated()
        assert len(seated) <= self._places
        active = self.scheduler.telemetry(self.now).active_sessions
        assert not budget.takes_turns or active <= max(budget.effective_active_cap, self._carried)
        ledger = self.scheduler._roster.ledger
        reserved = sum(
            ledger.held_for(session) if budget.takes_turns else session.job.need_tokens for session in seated
        )
        assert reserved == self.scheduler._roster.ledger.reserved
        cached = self.scheduler._roster.prefixes.rows
        assert (reserved + cached) * self.facts.kv_bytes_per_token <= budget.kv_bytes
        assert self.scheduler.telemetry(self.now).kv_cached_bytes == cached * self.facts.kv_bytes_per_token
        for session in seated:
            assert session.rows_done <= session.rows_planned < session.job.need_tokens
            assert session.emitted == len(self.clients.sessions[session.key].tokens)
            assert session.tokens_planned - session.emitted <= self._most_in_flight
        assert len(self._unanswered) == len(self.scheduler._inflight) <= self._most_in_flight

    def finish(self) -> None:
        """Run on without faults until nobody is live, then hold the node to being empty.

        Every tick that runs confirms at least one row of a live session, apart from those in flight and two a
        session: a miss that was not yet noticed, and a row behind a token that nobody could foresee to be the
        last. So the rows still to run bound the ticks.
        """
        if not self.worker_up:
            self.start_worker()
        self.engine.fail_decode = self.engine.fail_prefill = 0
        self.engine.fail_park = self.engine.fail_restore = False
        live = [client for _, client in self.clients.live()]
        bound = sum(client.job.need_tokens for client in live) + 2 * len(live) + 2 * self.depth
        if self.budget.takes_turns:  # each turn may begin with computing everything anew
            bound = sum((client.job.max_new_tokens + 2) * (client.job.need_tokens + 2) for client in live) + bound
        before, turns = self.ticks_run, 0
        while self.turn():
            self.check()
            turns += 1
            assert turns <= 2 * bound + 8, "the node does not come to rest"
        assert not self.clients.live(), f"{len(self.clients.live())} sessions starve"
        assert self.ticks_run - before <= bound
        self._check_empty()

    def _check_empty(self) -> None:
        seen = self.scheduler.telemetry(self.now)
        assert self.scheduler.idle
        assert (seen.kv_bytes, seen.scratch_bytes, seen.queue_depth, seen.active_sessions) == (0, 0, 0, 0)
        assert not self.engine.parked
        assert (seen.parked_sessions, seen.parked_bytes) == (0, 0)
        kept = self.scheduler._roster.prefixes
        assert self.engine.sequences + len(self.engine.missing) == len(kept.memory())
        if not self.engine.missing:
            assert self.engine.kv_tokens == kept.rows
            assert self.scheduler.kv_drift_rows == 0
        assert self.scheduler.next_deadline() is None


def _closes_tick(under_way: deque[bytes]) -> bool:
    """Whether the newest message under way closes a tick."""
    part = decode_from_worker(under_way[-1]) if under_way else None
    return isinstance(part, TickResult) and part.last
