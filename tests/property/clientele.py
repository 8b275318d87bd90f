"""What clients asked for and were told, and whether it may be told."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from hash_engine import reference

from treadle_broker.plan import Emitted, Event, Finished, Promoted, Rebuilding
from treadle_broker.prefix_hash import Chain, PrefixHasher
from treadle_broker.scheduler import Scheduler
from treadle_broker.session import Job, SessionKey
from treadle_shared.admission import AdmissionDecision, AdmissionReason
from treadle_shared.budget import NodeBudget
from treadle_shared.engine import EngineFacts
from treadle_shared.outcome import DoneReason
from treadle_shared.sampling import SamplingParams

BLOCK = 2  # tokens of a block in these worlds: their prompts are short
_HASHERS = {shared: PrefixHasher("node" if shared else "off", BLOCK) for shared in (True, False)}

POISON_LOSSES = 3  # two for the strikes, the second of which may be the first alone, and one more alone


@dataclass(frozen=True, slots=True)
class Wish:
    """One submission: lengths for the scheduler, tokens for the engine. ``held`` tokens of the answer came from an
    earlier broker: the job's ``emitted``. ``shared``: others may start from it, and it from others.
    ``asked``: the prompt is another's, which had so many tokens, with the answer to it, and more.
    """

    job: Job
    prompt: list[int]
    params: SamplingParams
    held: tuple[int, ...] = ()
    shared: bool = True
    asked: int = 0

    def chain(self) -> Chain:
        """A chain with nothing in it yet."""
        return _HASHERS[self.shared].chain(self.job.client, "")


@dataclass(slots=True)
class Client:
    """One accepted session. ``losses`` counts faults since its last token, ``waited`` ticks that left it out,
    ``paused`` ticks since it left the queue or had a row;
    ``may_end`` are the ends that somebody asked for.
    """

    wish: Wish
    sequence: array[int]
    chain: Chain
    promoted: bool = False
    ended: Finished | None = None
    facts: EngineFacts | None = None
    may_end: set[tuple[DoneReason, str]] = field(default_factory=set)
    losses: int = 0
    waited: int = 0
    paused: int = 0

    @property
    def job(self) -> Job:
        return self.wish.job

    @property
    def params(self) -> SamplingParams:
        return self.wish.params

    @property
    def tokens(self) -> list[int]:
        """The answer so far."""
        return self.sequence[len(self.wish.prompt) :].tolist()


def prefix_of(client: str, prompt: list[int], shared: bool = True) -> bytes:
    """What the scheduler is told of a prompt."""
    return _HASHERS[shared].chain(client, "").grow(array("i", prompt))


def resuming(wish: Wish, share: float, facts: EngineFacts) -> Wish:
    """The same wish of a client that holds part of the answer already, from an engine of these facts."""
    job = wish.job
    answer, _ = reference(wish.prompt, wish.params, job.max_new_tokens, facts)
    held = tuple(answer[: min(int(share * len(answer)), job.max_new_tokens - 1)])
    return replace(wish, job=replace(job, emitted=len(held), resumed=True), held=held)


def following(wish: Wish, before: Client, most: int) -> Wish:
    """The next turn of a conversation: what was said before, and then the wish's own prompt; at most so many tokens."""
    prompt = [*before.sequence, *wish.prompt][:most]
    prefix = prefix_of(before.job.client, prompt, wish.shared)
    job = replace(wish.job, client=before.job.client, prompt_tokens=len(prompt), prefix=prefix)
    return replace(wish, job=job, prompt=prompt, asked=before.job.prompt_tokens)


class Clientele:
    """Every session of a scheduler from outside. ``facts`` and ``budget`` are those of the engine that runs now."""

    def __init__(self, scheduler: Scheduler, budget: NodeBudget, facts: EngineFacts) -> None:
        self.budget = budget
        self.facts = facts
        self.draining = False
        self.sessions: dict[SessionKey, Client] = {}
        self.misses_possible = False
        self._scheduler = scheduler
        self._refused: Counter[str] = Counter()
        self._epochs: dict[tuple[str, str], int] = {}

    def live(self) -> list[tuple[SessionKey, Client]]:
        """Sessions that were accepted and have not ended."""
        return [(key, client) for key, client in self.sessions.items() if client.ended is None]

    def queued(self) -> set[SessionKey]:
        """Keys that wait."""
        return {key for key, _ in self._scheduler.positions()}

    def fault(self) -> None:
        """A worker, a batch or a tick was lost."""
        for client in self.sessions.values():
            client.losses += 1
            client.waited = client.paused = 0

    # ---- admission

    def submit(self, wishes: Sequence[Wish], now: float) -> list[AdmissionDecision]:
        """Submit together, and hold each decision against what a plain reading of the rules gives."""
        before = self._scheduler.telemetry(now)
        waiting = [key for key, _ in self._scheduler.positions()]
        expected = self._expected([wish.job for wish in wishes])
        decisions = self._scheduler.submit([wish.job for wish in wishes], now)
        if any(decision.budget == "target_ttft_ms" for decision in decisions):  # a plain reading does not measure
            assert self.budget.target_ttft_ms
            assert not wishes[0].job.resumed
        else:
            assert [decision.reason for decision in decisions] == expected
        assert [decision.session_id for decision in decisions] == [wish.job.session_id for wish in wishes]
        for wish, decision in zip(wishes, decisions, strict=True):
            if decision.accepted:
                self._accept(wish, decision)
            else:
                self._refuse(decision)
        if not decisions[0].accepted:
            after = self._scheduler.telemetry(now)
            assert after.queue_depth == before.queue_depth
            assert after.active_sessions == before.active_sessions
            assert [key for key, _ in self._scheduler.positions()] == waiting
        elif decisions[-1].reason is AdmissionReason.QUEUED:
            last = SessionKey(wishes[-1].job.client, wishes[-1].job.session_id, decisions[-1].epoch)
            assert dict(self._scheduler.positions())[last] == decisions[-1].position
        return decisions

    def _accept(self, wish: Wish, decision: AdmissionDecision) -> None:
        key = SessionKey(wish.job.client, wish.job.session_id, decision.epoch)
        assert key == self._scheduler.find(wish.job.client, wish.job.session_id)
        assert decision.epoch > self._epochs.get(key[:2], -1), "an epoch was used again"
        self._epochs[key[:2]] = decision.epoch
        chain = wish.chain()
        assert chain.grow(array("i", wish.prompt)) == wish.job.prefix
        client = self.sessions[key] = Client(wish, array("i", [*wish.prompt, *wish.held]), chain)
        client.facts = self.facts if wish.held else None
        self._extend(key, client)

    def _refuse(self, decision: AdmissionDecision) -> None:
        self._refused[decision.reason.value] += 1
        if decision.reason is AdmissionReason.REJECTED_QUEUE_FULL:
            assert decision.needed > decision.available >= 0
            assert decision.retry_after_s is not None
            assert decision.retry_after_s > 0

    def _expected(self, jobs: Sequence[Job]) -> list[AdmissionReason]:
        """Decided in order, and all alike where one is refused."""
        roster = self._scheduler._roster
        free = min(self.budget.seats, self.facts.max_sequences) - roster.slots.used
        kv_left = self.budget.kv_bytes // self.facts.kv_bytes_per_token - roster.ledger.reserved
        queued = len(self.queued())
        ahead = queued + len(roster._returning)
        if self.budget.takes_turns:
            free, kv_left, ahead = self.budget.effective_active_cap - roster.active, 1 << 40, queued
        tokens = sum(self.sessions[key].job.prompt_tokens for key in self.queued())
        taken = {key[:2] for key, _ in self.live()}
        reasons: list[AdmissionReason] = []
        for job in jobs:
            reason = self._never(job, taken)
            if reason is None and not ahead and free > 0 and job.need_tokens <= kv_left:
                reason = AdmissionReason.ADMITTED
                free, kv_left = free - 1, kv_left - job.need_tokens
            elif reason is None:
                room_again = job.resumed and queued < self.budget.max_active + self.budget.queue_depth
                tokens, queued, ahead = tokens + job.prompt_tokens, queued + 1, ahead + 1
                full = queued > self.budget.queue_depth or tokens > self.budget.queue_tokens
                full = full and not room_again
                reason = AdmissionReason.REJECTED_QUEUE_FULL if full else AdmissionReason.QUEUED
            if not reason.accepted:
                return [reason] * len(jobs)
            taken.add((job.client, job.session_id))
            reasons.append(reason)
        return reasons

    def _never(self, job: Job, taken: set[tuple[str, str]]) -> AdmissionReason | None:
        """The refusal that waiting cannot cure."""
        if self.draining:
            return AdmissionReason.REJECTED_DRAINING
        if (job.client, job.session_id) in taken:
            return AdmissionReason.REJECTED_DUPLICATE
        return self._too_large(job)

    def _too_large(self, job: Job) -> AdmissionReason | None:
        if job.need_tokens > self.facts.context_tokens:
            return AdmissionReason.REJECTED_CONTEXT
        if job.need_tokens * self.facts.kv_bytes_per_token > self.budget.kv_bytes:
            return AdmissionReason.REJECTED_KV_BUDGET
        return None if self.budget.effective_active_cap > 0 else AdmissionReason.REJECTED_SCRATCH_BUDGET

    def can_ever_fit(self, job: Job) -> bool:
        """Whether an empty node could run the job."""
        return self._too_large(job) is None

    # ---- deadlines

    def overdue(self, now: float) -> list[SessionKey]:
        """Live sessions whose time is up; they may now end with the bound that passed first."""
        queued = self.queued()
        late = []
        for key, client in self.live():
            passed = sorted((at, bound) for at, bound in self._bounds(key, client, queued) if at <= now)
            if passed:
                client.may_end |= {(DoneReason.DEADLINE, bound) for at, bound in passed if at == passed[0][0]}
                late.append(key)
        return late

    def next_deadline(self) -> float | None:
        """The earliest bound that still counts."""
        queued = self.queued()
        bounds = (at for key, client in self.live() for at, _ in self._bounds(key, client, queued))
        return min(bounds, default=None)

    def _bounds(self, key: SessionKey, client: Client, queued: set[SessionKey]) -> Iterator[tuple[float, str]]:
        if client.job.deadline is not None:
            yield client.job.deadline, "deadline"
        if client.job.queue_deadline is not None and key in queued:
            yield client.job.queue_deadline, "queue_timeout"

    # ---- what they are told

    def observe(self, events: Sequence[Event]) -> None:
        """Hold events against what each client may be told."""
        for event in events:
            client = self.sessions[event.key]
            assert client.ended is None, f"{event} after {client.ended}"
            if isinstance(event, Emitted):
                self._emitted(client, event)
            elif isinstance(event, Finished):
                self._finished(client, event)
            elif isinstance(event, Promoted):
                assert not client.promoted, "promoted twice"
                client.promoted = True
            else:
                assert isinstance(event, Rebuilding)
                assert event.key not in self.queued()
                for other in self.sessions.values():
                    other.paused = 0

    def _emitted(self, client: Client, event: Emitted) -> None:
        client.facts = client.facts or self.facts
        assert client.facts.recipe_fingerprint == self.facts.recipe_fingerprint, "tokens of two recipes"
        expected, _ = self._reference(client)
        assert event.index == len(client.tokens)
        assert event.index < len(expected), "a token beyond the end"
        assert event.token == expected[event.index], "not the token of an undisturbed run"
        client.sequence.append(event.token)
        client.losses = 0
        self._extend(event.key, client)

    def _extend(self, key: SessionKey, client: Client) -> None:
        digests = client.chain.grow(client.sequence)
        if digests:
            self._scheduler.extend(key, digests)

    def _reference(self, client: Client) -> tuple[list[int], bool]:
        return reference(client.wish.prompt, client.params, client.job.max_new_tokens, client.facts or self.facts)

    def _finished(self, client: Client, event: Finished) -> None:
        client.ended = event
        assert event.tokens == len(client.tokens)
        if (event.reason, event.detail) in client.may_end:
            return
        if event.reason in (DoneReason.LENGTH, DoneReason.STOP):
            tokens, stopped = self._reference(client)
            assert client.tokens == tokens, "an answer that is not whole"
            assert (event.reason is DoneReason.STOP) == stopped
        elif event.reason is DoneReason.CACHE_MISS:
            assert self.misses_possible
        else:
            assert (event.reason, event.detail) == (DoneReason.FAILED, "poison"), event
            assert client.losses >= POISON_LOSSES

    def check(self, now: float) -> None:
        """The telemetry counts exactly these sessions."""
        seen = self._scheduler.telemetry(now)
        ends = Counter(client.ended.reason.bucket for client in self.sessions.values() if client.ended is not None)
        assert seen.balanced
        assert seen.submitted_total == len(self.sessions) + self._refused.total()
        assert seen.rejected_by_reason == dict(self._refused)
        assert seen.done_total == ends["done"]
        assert seen.failed_total == ends["failed"]
        assert seen.cancelled_total == ends["cancelled"]
        assert seen.queue_depth + seen.active_sessions == len(self.live())
        assert set(self._scheduler._roster.sessions) == {key for key, _ in self.live()}
