"""A scheduler, a worker that runs its ticks, and everything a client could hold either of them to."""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
from hash_engine import HashEngine, Poison, WorkerDied, reference

from treadle_broker.plan import Emitted, Event, Finished, Plan, Promoted, Rebuilding
from treadle_broker.scheduler import Scheduler
from treadle_broker.session import Job, Session, SessionKey
from treadle_broker.tick_builder import build_tick
from treadle_shared.admission import AdmissionDecision, AdmissionReason
from treadle_shared.budget import NodeBudget
from treadle_shared.codec import decode_from_worker, decode_to_worker, encode
from treadle_shared.engine import EngineFacts
from treadle_shared.outcome import DoneReason
from treadle_shared.runner import TickRunner
from treadle_shared.sampling import SamplingParams
from treadle_shared.ticks import Tick, TickResult


@dataclass(slots=True)
class Client:
    """What one session's client asked for and was told."""

    job: Job
    prompt: list[int]
    params: SamplingParams
    sequence: array[int]
    promoted: bool = False
    ended: Finished | None = None
    facts: EngineFacts | None = None
    may_end: set[tuple[DoneReason, str]] = field(default_factory=set)
    faults: int = 0
    waited: int = 0

    @property
    def tokens(self) -> list[int]:
        """The answer so far."""
        return self.sequence[len(self.prompt) :].tolist()


class World:
    """Drives a Scheduler over a TickRunner one message at a time and judges everything that comes out.

    Ticks and results cross as bytes, and each stays under way until told to move. ``faults`` counts lost workers,
    failed batches and refused ticks.
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
        self.scheduler = Scheduler(budget, facts, depth=depth, recover_misses=recover_misses)
        self.now = 0.0
        self.budget = budget
        self.facts = facts
        self.depth = depth
        self.clients: dict[SessionKey, Client] = {}
        self.faults = 0
        self.deaths = 0
        self.undisturbed = True  # no miss and no failed batch yet: the ledger is exact
        self.ticks_run = 0
        self._poison = poison
        self._recover_misses = recover_misses
        self._refused: Counter[str] = Counter()
        self._epochs: dict[tuple[str, str], int] = {}
        self._to_worker: deque[bytes] = deque()
        self._to_broker: deque[bytes] = deque()
        self.late: list[TickResult] = []
        self._unanswered: set[int] = set()
        self._tampered: set[int] = set()
        self._running: Iterator[TickResult] | None = None
        self.worker_up = False
        self.engine = HashEngine(facts, poison)
        self.runner = TickRunner(self.engine, clock=lambda: 0.0)

    # ---- clients

    def submit(self, wishes: Sequence[tuple[Job, list[int], SamplingParams]]) -> list[AdmissionDecision]:
        """Submit jobs together and hold the decisions against what was free before."""
        before = self.scheduler.telemetry(self.now)
        waiting = [key for key, _ in self.scheduler.positions()]
        decisions = self.scheduler.submit([job for job, _, _ in wishes], self.now)
        assert [decision.session_id for decision in decisions] == [job.session_id for job, _, _ in wishes]
        assert len({decision.accepted for decision in decisions}) <= 1, "all of a group or none"
        for (job, prompt, params), decision in zip(wishes, decisions, strict=True):
            if decision.accepted:
                self._accepted(job, prompt, params, decision)
            else:
                self._refused[decision.reason.value] += 1
        for decision in decisions:
            self._check_reason(decision, before.queue_depth + len(wishes))
        if len(decisions) == 1 and decisions[0].reason is AdmissionReason.QUEUED:
            key = self.scheduler.find(wishes[0][0].client, wishes[0][0].session_id)
            assert dict(self.scheduler.positions()).get(key) == decisions[0].position
        if decisions and not decisions[0].accepted:
            after = self.scheduler.telemetry(self.now)
            assert after.queue_depth == before.queue_depth
            assert after.active_sessions == before.active_sessions
            assert [key for key, _ in self.scheduler.positions()] == waiting
        return decisions

    def _accepted(self, job: Job, prompt: list[int], params: SamplingParams, decision: AdmissionDecision) -> None:
        assert job.need_tokens <= self.facts.context_tokens
        assert job.need_tokens * self.facts.kv_bytes_per_token <= self.budget.kv_bytes
        key = SessionKey(job.client, job.session_id, decision.epoch)
        assert key == self.scheduler.find(job.client, job.session_id)
        assert decision.epoch > self._epochs.get(key[:2], -1), "an epoch was used again"
        self._epochs[key[:2]] = decision.epoch
        self.clients[key] = Client(job, prompt, params, array("i", prompt))

    def _check_reason(self, decision: AdmissionDecision, most_queued: int) -> None:
        if decision.reason is AdmissionReason.REJECTED_QUEUE_FULL and decision.budget == "queue_depth":
            assert most_queued > self.budget.queue_depth
            assert decision.needed > decision.available >= 0
            assert decision.retry_after_s is not None
            assert decision.retry_after_s > 0

    def cancel(self, key: SessionKey) -> None:
        """Cancel by exact key; only a live session answers."""
        client = self.clients.get(key)
        live = client is not None and client.ended is None
        if live:
            self.clients[key].may_end.add((DoneReason.CANCELLED, "gone"))
        events = self.scheduler.cancel(key, self.now, detail="gone")
        assert bool(events) == live
        self.observe(events)
        assert not live or self.clients[key].ended is not None

    def stop(self, key: SessionKey, cut: int) -> None:
        """A stop string was found ``cut`` tokens before the end of what was emitted."""
        client = self.clients[key]
        n_tokens = max(0, len(client.tokens) - cut)
        if client.ended is None:
            client.may_end.add((DoneReason.STOP, "stop"))
        events = self.scheduler.stop(key, n_tokens, DoneReason.STOP, self.now, "stop")
        if events:
            assert isinstance(events[0], Finished)
            assert events[0].tokens == n_tokens
            client.sequence = client.sequence[: len(client.prompt) + n_tokens]
        self.observe(events)

    def advance(self, seconds: float) -> None:
        """Move the clock and end whoever is out of time."""
        self.now += seconds
        overdue = [key for key, client in self._live() if self._due(key, client) is not None]
        for key in overdue:
            self.clients[key].may_end.add((DoneReason.DEADLINE, self._due(key, self.clients[key]) or ""))
        self.observe(self.scheduler.expire(self.now))
        assert all(self.clients[key].ended is not None for key in overdue)
        assert self.scheduler.next_deadline() == min(self._pending_deadlines(), default=None)

    def _due(self, key: SessionKey, client: Client) -> str | None:
        """The bound that has passed, the earlier one where both have."""
        bounds = [(client.job.deadline, "deadline")]
        if key in self.queued():
            bounds.append((client.job.queue_deadline, "queue_timeout"))
        passed = [(at, bound != "queue_timeout", bound) for at, bound in bounds if at is not None and at <= self.now]
        return min(passed)[2] if passed else None

    def _pending_deadlines(self) -> Iterator[float]:
        queued = self.queued()
        for key, client in self._live():
            if client.job.deadline is not None:
                yield client.job.deadline
            if client.job.queue_deadline is not None and key in queued:
                yield client.job.queue_deadline

    def queued(self) -> set[SessionKey]:
        """Keys that wait."""
        return {key for key, _ in self.scheduler.positions()}

    def _live(self) -> list[tuple[SessionKey, Client]]:
        return [(key, client) for key, client in self.clients.items() if client.ended is None]

    # ---- one tick's way

    def plan(self) -> bool:
        """Ask for a tick and send it; False where there is none."""
        scheduler = self.scheduler
        line = [key for key, _ in scheduler.positions()]
        seated = self._seated()
        wanting = [session for session in seated if session.wants_decode]
        prefilling = any(session.prefill_left > 0 for session in seated)
        plan = scheduler.plan(self.now)
        served = [event.key for event in scheduler.take_promoted() if self._note_promoted(event)]
        from_queue = [key for key in served if key in line]
        assert from_queue == line[: len(from_queue)], "somebody overtook the head of the queue"
        if plan is None:
            return False
        assert self.worker_up
        self._check_plan(plan)
        if not scheduler._roster.suspects._suspects:
            self._check_policy(plan, wanting, prefilling)
        self._unanswered.add(plan.tick_id)
        assert len(self._unanswered) <= self.depth
        tick = build_tick(plan, "broker", "worker", self.clients.__getitem__)
        self._to_worker.append(encode(tick))
        return True

    def _seated(self) -> list[Session]:
        return self.scheduler._roster.slots.sessions()

    def _note_promoted(self, event: Event) -> bool:
        assert isinstance(event, Promoted)
        client = self.clients[event.key]
        assert client.ended is None, "a session was promoted after its end"
        assert not client.promoted, "a session was promoted twice"
        client.promoted = True
        return True

    def _check_plan(self, plan: Plan) -> None:
        budget, rows = self.budget, [*plan.decode, *plan.prefill]
        slots = [row.slot for row in rows]
        assert len(slots) == len(set(slots))
        assert all(slot < min(budget.max_active, self.facts.max_sequences) for slot in slots)
        assert [row.slot for row in plan.decode] == sorted(row.slot for row in plan.decode)
        assert len(plan.decode) <= budget.max_batch_size
        cap, min_rows = budget.max_prefill_tokens_per_tick, self.facts.min_prefill_rows
        alone = len(plan.prefill) == 1 and plan.prefill_tokens <= max(cap, 2 * min_rows - 1)
        assert plan.prefill_tokens <= cap or alone
        assert all(self.clients[row.key].ended is None for row in rows), "a row for a session that ended"

    def _check_policy(self, plan: Plan, wanting: list[Session], prefilling: bool) -> None:
        """Decode first, nobody left out but for the batch bound, and one prompt always moves."""
        decoding = {row.key for row in plan.decode}
        left_out = [session for session in wanting if session.live and session.key not in decoding]
        assert not left_out or len(plan.decode) == self.budget.max_batch_size
        assert not prefilling or plan.prefill
        for session in self._seated():
            client = self.clients[session.key]
            client.waited = client.waited + 1 if session in left_out else 0
            assert client.waited <= -(-self.budget.max_active // self.budget.max_batch_size), "a session starves"

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
        assert not part.error or not self.undisturbed, "an error out of nothing"
        limit = min(self.budget.max_active, self.facts.max_sequences)
        assert self.engine.sequences <= limit
        if self.undisturbed:
            self.runner.check()
            assert self.engine.kv_tokens * self.facts.kv_bytes_per_token <= self.budget.kv_bytes

    def deliver(self) -> bool:
        """Bring the next result part to the scheduler; False where none is under way."""
        if not self._to_broker:
            return False
        part = decode_from_worker(self._to_broker.popleft())
        assert isinstance(part, TickResult)
        if part.error_code:
            self._count_fault()
        self.observe(self.scheduler.complete(part, self.now))
        if part.last:
            self._unanswered.discard(part.tick_id)
            if self.undisturbed:
                assert self.scheduler.kv_drift_rows == 0
        return True

    def deliver_late(self, choice: int) -> None:
        """A result of a lost worker arrives."""
        stale = self.scheduler.stale_results
        part = self.late.pop(choice % len(self.late))
        assert self.scheduler.complete(part, self.now) == []
        assert self.scheduler.stale_results == stale + 1

    def turn(self) -> bool:
        """Plan what can be planned, run one tick, bring its results back; False where nothing moved."""
        planned = False
        while self.plan():
            planned = True
        worked = self.work()
        while self._running is not None and self.work_rest():
            pass
        delivered = False
        while self.deliver():
            delivered = True
        return planned or worked or delivered

    def work_rest(self) -> bool:
        """The next part of the running tick, if it has one."""
        running = self._running
        return self.work() and self._running is running

    # ---- faults

    def fail_next_batch(self, code: int, prefill: bool) -> None:
        """The next decode (or prefill) batch fails."""
        self.undisturbed = False
        if prefill:
            self.engine.fail_prefill = code
        else:
            self.engine.fail_decode = code

    def evict(self, choice: int) -> None:
        """One sequence's KV is gone."""
        if self.engine.evict(choice):
            self.undisturbed = False

    def tamper(self) -> bool:
        """A tick under way is spoiled: the runner must refuse it whole."""
        if not self._to_worker:
            return False
        tick = decode_to_worker(self._to_worker[-1])
        assert isinstance(tick, Tick)
        if not tick.decode:
            return False
        row = msgspec.structs.replace(tick.decode[0], gen=tick.decode[0].gen + 1_000_000)
        self._to_worker[-1] = encode(msgspec.structs.replace(tick, decode=[row, *tick.decode[1:]]))
        self._tampered.add(tick.tick_id)
        self.undisturbed = False
        return True

    def lose_worker(self, late_results: bool) -> None:
        """The worker dies with every tick under way; what it had sent may still arrive."""
        parts = [decode_from_worker(data) for data in self._to_broker]
        if late_results:
            self.late += [part for part in parts if isinstance(part, TickResult)][: 8 - len(self.late)]
        self._to_worker.clear()
        self._to_broker.clear()
        self._unanswered.clear()
        self._running = None
        self.worker_up = False
        self.deaths += 1
        self._count_fault()
        self.observe(self.scheduler.worker_lost(self.now))
        assert not self.scheduler.ready
        assert self.scheduler.plan(self.now) is None

    def _count_fault(self) -> None:
        self.faults += 1
        for client in self.clients.values():
            client.faults += 1
            client.waited = 0

    def start_worker(self, facts: EngineFacts | None = None, budget: NodeBudget | None = None) -> None:
        """A fresh worker, perhaps of another recipe, perhaps under another budget."""
        old, self.facts = self.facts, facts or self.facts
        self.budget = budget or self.budget
        self.engine = HashEngine(self.facts, self._poison)
        self.runner = TickRunner(self.engine, clock=lambda: 0.0)
        self.undisturbed = True
        self.worker_up = True
        for _, client in self._live():
            if old.recipe_fingerprint != self.facts.recipe_fingerprint and client.tokens:
                client.may_end.add((DoneReason.FAILED, "recipe_changed"))
            elif not self._can_ever_fit(client.job):
                client.may_end.add((DoneReason.FAILED, "does_not_fit"))
        doomed = [client for _, client in self._live() if client.may_end]
        self.observe(self.scheduler.worker_ready(self.facts, self.now, budget))
        assert all(client.ended is not None for client in doomed)
        assert self.scheduler.ready

    def _can_ever_fit(self, job: Job) -> bool:
        fits_kv = job.need_tokens * self.facts.kv_bytes_per_token <= self.budget.kv_bytes
        return job.need_tokens <= self.facts.context_tokens and fits_kv and self.budget.effective_active_cap > 0

    # ---- judging

    def observe(self, events: Sequence[Event]) -> None:
        """Hold events against what each client may be told."""
        for event in events:
            client = self.clients[event.key]
            assert client.ended is None, f"{event} after {client.ended}"
            if isinstance(event, Emitted):
                self._emitted(client, event)
            elif isinstance(event, Finished):
                self._finished(client, event)
            else:
                assert isinstance(event, Rebuilding)
                assert event.key not in self.queued()

    def _emitted(self, client: Client, event: Emitted) -> None:
        client.facts = client.facts or self.facts
        assert client.facts.recipe_fingerprint == self.facts.recipe_fingerprint
        assert event.index == len(client.tokens)
        expected, _ = self._reference(client)
        assert event.index < len(expected), "a token beyond the end"
        assert event.token == expected[event.index], "not the token of an undisturbed run"
        client.sequence.append(event.token)
        client.faults = 0

    def _reference(self, client: Client) -> tuple[list[int], bool]:
        return reference(client.prompt, client.params, client.job.max_new_tokens, client.facts or self.facts)

    def _finished(self, client: Client, event: Finished) -> None:
        client.ended = event
        assert event.tokens == len(client.tokens)
        if (event.reason, event.detail) in client.may_end:
            return
        if event.reason in (DoneReason.LENGTH, DoneReason.STOP):
            tokens, ended = self._reference(client)
            assert client.tokens == tokens, "an answer that is not whole"
            assert (event.reason is DoneReason.STOP) == ended
        elif event.reason is DoneReason.CACHE_MISS:
            assert not self.undisturbed
        else:
            assert (event.reason, event.detail) == (DoneReason.FAILED, "poison"), event
            assert client.faults >= 3, "three losses at least make a session poison"

    def check(self) -> None:
        """Everything that must hold at any time."""
        self.scheduler.check()
        seen = self.scheduler.telemetry(self.now)
        ends = Counter(client.ended.reason.bucket for client in self.clients.values() if client.ended is not None)
        assert seen.balanced
        assert seen.submitted_total == len(self.clients) + self._refused.total()
        assert seen.rejected_by_reason == dict(self._refused)
        assert (seen.done_total, seen.failed_total, seen.cancelled_total) == (
            ends["done"],
            ends["failed"],
            ends["cancelled"],
        )
        assert seen.queue_depth + seen.active_sessions == len(self._live())
        assert set(self.scheduler._roster.sessions) == {key for key, _ in self._live()}
        self._check_bounds()

    def _check_bounds(self) -> None:
        budget, roster, seated = self.budget, self.scheduler._roster, self._seated()
        assert len(seated) <= min(budget.effective_active_cap, self.facts.max_sequences)
        reserved = sum(session.job.need_tokens for session in seated)
        assert reserved == roster.ledger.reserved
        assert reserved * self.facts.kv_bytes_per_token <= budget.kv_bytes
        for session in seated:
            assert session.rows_done <= session.rows_planned < session.job.need_tokens
            assert session.emitted == len(self.clients[session.key].tokens)
            assert session.tokens_planned - session.emitted <= self.depth
        assert len(self._unanswered) == len(self.scheduler._inflight) <= self.depth

    def finish(self) -> int:
        """Run on without faults until nobody is live, then hold the node to being empty; the ticks it took.

        Every tick that runs confirms at least one row of a live session, apart from those in flight and two a
        session: a miss that was not yet noticed, and a row behind a token that nobody could foresee to be the
        last. So the rows still to run bound the ticks.
        """
        if not self.worker_up:
            self.start_worker()
        self.engine.fail_decode = self.engine.fail_prefill = 0
        live = self._live()
        bound = sum(client.job.need_tokens for _, client in live) + 2 * len(live) + 2 * self.depth
        before = self.ticks_run
        turns = 0
        while self.turn():
            self.check()
            turns += 1
            assert turns <= 2 * bound + 8, "the node does not come to rest"
        assert not self._live(), f"{len(self._live())} sessions starve"
        assert self.ticks_run - before <= bound
        self._check_empty()
        return self.ticks_run - before

    def _check_empty(self) -> None:
        seen = self.scheduler.telemetry(self.now)
        assert self.scheduler.idle
        assert (seen.kv_bytes, seen.scratch_bytes, seen.queue_depth, seen.active_sessions) == (0, 0, 0, 0)
        assert self.engine.kv_tokens == 0
        assert self.engine.sequences == 0
        assert self.scheduler.kv_drift_rows == 0
        assert self.scheduler.next_deadline() is None
