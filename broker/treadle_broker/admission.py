"""Bounded admission: what is refused, what runs now, what waits."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from math import ceil, floor

import msgspec

from treadle_broker.counters import Counters
from treadle_broker.first_token import FirstTokenEstimate
from treadle_broker.retry import RetryEstimator
from treadle_broker.roster import Roster
from treadle_broker.session import Job, Session, SessionKey, State
from treadle_shared.admission import AdmissionDecision, AdmissionReason

_MAX_REMEMBERED_IDS = 4096  # ids whose last epoch is kept; older ones continue above every forgotten epoch
_SHARE_OF_OTHERS = 0.25  # of the target, that others may always take
_SHORTEST_TICK_S = 1e-4  # a mean may be nothing where a clock stood still


class _Epochs:
    """The next epoch of each id: above every epoch that the id had before."""

    def __init__(self) -> None:
        self._last: OrderedDict[tuple[str, str], int] = OrderedDict()
        self._floor = -1

    def next(self, client: str, session_id: str) -> int:
        name = (client, session_id)
        epoch = self._last.pop(name, self._floor) + 1
        self._last[name] = epoch
        if len(self._last) > _MAX_REMEMBERED_IDS:
            _, forgotten = self._last.popitem(last=False)
            self._floor = max(self._floor, forgotten)
        return epoch

    def memory(self) -> tuple[int, list[tuple[str, str, int]]]:
        """The highest forgotten epoch, and the last one of each remembered id, oldest first."""
        return self._floor, [(client, session_id, last) for (client, session_id), last in self._last.items()]

    def remember(self, floor: int, epochs: Sequence[tuple[str, str, int]]) -> None:
        """Go on from another node's memory."""
        self._floor = floor
        self._last = OrderedDict(((client, session_id), last) for client, session_id, last in epochs)


class Admission:
    """Decides on submissions and seats or queues what it accepts."""

    def __init__(self, roster: Roster, counters: Counters, retry: RetryEstimator, estimate: FirstTokenEstimate) -> None:
        self.draining = False
        self._roster = roster
        self._counters = counters
        self._retry = retry
        self._estimate = estimate
        self.epochs = _Epochs()
        self._ids: dict[tuple[str, str], SessionKey] = {}

    def submit(self, jobs: Sequence[Job], now: float) -> tuple[list[Session], list[AdmissionDecision]]:
        """All of the jobs or none; the accepted sessions, and one decision for each job."""
        accepted: list[Session] = []
        decisions: list[AdmissionDecision] = []
        for job in jobs:
            outcome = self._decide(job, now, first=not accepted)
            if isinstance(outcome, AdmissionDecision):
                self._withdraw(accepted)
                return [], self._refuse_together(jobs, len(accepted), outcome, now)
            accepted.append(outcome)
            decisions.append(self._accepted(outcome))
        self._counters.submitted += len(accepted)
        for _ in accepted:
            self._retry.taken()
        return accepted, decisions

    def full_refusal(self, client: str, session_id: str, prompt_tokens: int, now: float) -> AdmissionDecision | None:
        """The refusal that a job of at least so many tokens meets now because of what waits, or None."""
        if self.draining:
            return _refusal(session_id, AdmissionReason.REJECTED_DRAINING, message="the node is draining")
        seat = not self._roster.anyone_ahead and self._roster.open_seats > 0
        full = None if seat else self._queue_full(client, session_id, prompt_tokens, now)
        return full or self._too_late(client, session_id, 1, seat, now)  # the least that is left of any prompt

    def current(self, client: str, session_id: str) -> SessionKey | None:
        """The live session of that exact id."""
        return self._ids.get((client, session_id))

    def forget(self, session: Session) -> None:
        """The session ended; its id may be used again at once."""
        del self._ids[session.key.client, session.key.session_id]
        if not self._roster.sessions:
            self._retry.emptied()

    # ---- one job

    def _decide(self, job: Job, now: float, *, first: bool) -> Session | AdmissionDecision:
        """``first``: of those submitted together, which wait for one another by their own wish."""
        refusal = self._never_fits(job)
        if refusal is not None:
            return refusal
        session = Session(key=SessionKey(job.client, job.session_id, 0), job=job, submitted_at=now)
        seat = not self._roster.anyone_ahead and self._roster.fits(session)
        full = None
        if not seat and not self._resumes(job):
            full = self._queue_full(job.client, job.session_id, job.prompt_tokens, now)
        timed = self._roster.budget.target_ttft_ms > 0 and first and not job.resumed
        if full is None and timed:
            full = self._too_late(job.client, job.session_id, self._estimate.rows_of(session), seat, now)
        if full is not None:
            return full
        self._enter(session)
        if seat:
            self._roster.promote(session, now)
        else:
            self._roster.wait(session)
        return session

    def _enter(self, session: Session) -> None:
        client, session_id, _ = session.key
        session.key = SessionKey(client, session_id, self.epochs.next(client, session_id))
        self._ids[client, session_id] = session.key
        self._roster.enter(session)

    def _accepted(self, session: Session) -> AdmissionDecision:
        queued = session.state is State.QUEUED
        return AdmissionDecision(
            reason=AdmissionReason.QUEUED if queued else AdmissionReason.ADMITTED,
            session_id=session.key.session_id,
            epoch=session.key.epoch,
            position=self._roster.queue.ahead(session) if queued else 0,
        )

    def _never_fits(self, job: Job) -> AdmissionDecision | None:
        """Refusals that waiting cannot cure (or only the end of the same id's session)."""
        if self.draining:
            return _refusal(job.session_id, AdmissionReason.REJECTED_DRAINING, message="the node is draining")
        if (job.client, job.session_id) in self._ids:
            return _refusal(
                job.session_id,
                AdmissionReason.REJECTED_DUPLICATE,
                field="session_id",
                message="a session of this id is still running",
            )
        return self._over_context(job) or self._over_kv(job) or self._over_scratch(job)

    def _over_context(self, job: Job) -> AdmissionDecision | None:
        limit = self._roster.facts.context_tokens
        if job.need_tokens <= limit:
            return None
        if job.prompt_tokens < limit:
            why = f"{job.prompt_tokens} prompt tokens and max_tokens={job.max_new_tokens} exceed"
        else:
            why = f"{job.prompt_tokens} prompt tokens leave no room for an answer in"
        return _refusal(
            job.session_id,
            AdmissionReason.REJECTED_CONTEXT,
            budget="context_tokens",
            needed=job.need_tokens,
            available=limit,
            limit=limit,
            message=f"{why} the {limit} tokens that one session can hold",
        )

    def _over_kv(self, job: Job) -> AdmissionDecision | None:
        needed = job.need_tokens * self._roster.facts.kv_bytes_per_token
        limit = self._roster.budget.kv_bytes
        if needed <= limit:
            return None
        return _refusal(
            job.session_id,
            AdmissionReason.REJECTED_KV_BUDGET,
            budget="kv_bytes",
            needed=needed,
            available=max(0, limit - self._roster.ledger.reserved * self._roster.facts.kv_bytes_per_token),
            limit=limit,
            message="the session's KV alone exceeds the KV budget",
        )

    def _over_scratch(self, job: Job) -> AdmissionDecision | None:
        budget = self._roster.budget
        if budget.effective_active_cap > 0:
            return None
        return _refusal(
            job.session_id,
            AdmissionReason.REJECTED_SCRATCH_BUDGET,
            budget="scratch_bytes",
            needed=budget.scratch_bytes_per_session,
            available=budget.scratch_bytes,
            limit=budget.scratch_bytes,
            message="one session's scratch exceeds the scratch envelope",
        )

    # ---- the queue's bounds

    def _queue_full(self, client: str, session_id: str, prompt_tokens: int, now: float) -> AdmissionDecision | None:
        budget, queue = self._roster.budget, self._roster.queue
        for name, needed, used, limit in (
            ("queue_depth", 1, len(queue), budget.queue_depth),
            ("queue_tokens", prompt_tokens, queue.tokens, budget.queue_tokens),
        ):
            if used + needed > limit:
                return _refusal(
                    session_id,
                    AdmissionReason.REJECTED_QUEUE_FULL,
                    budget=name,
                    needed=needed,
                    available=max(0, limit - used),
                    limit=limit,
                    retry_after_s=self._retry_after(client, now),
                    message="every slot is busy and the queue is full",
                )
        return None

    def _too_late(self, client: str, session_id: str, rows: int, seat: bool, now: float) -> AdmissionDecision | None:
        """The refusal where the first token would come later than the target because of others. Whoever finds a
        ``seat`` and no prompt ahead is late by its own alone, and taken; and so is a prompt that would be late by
        itself, or nearly, if others take no more than a share of the target: or it would never get in.
        """
        target_s = self._roster.budget.target_ttft_ms / 1000
        ahead = self._estimate.rows_ahead() if target_s else 0
        if not target_s or (seat and not ahead):
            return None
        before_s = max(self._estimate.after(ahead), 0.0 if seat else self._next_slot_s())
        own_s = min(self._estimate.after(rows), (1 - _SHARE_OF_OTHERS) * target_s)
        late_s = before_s + own_s - target_s
        if late_s <= 0:
            return None
        return _refusal(
            session_id,
            AdmissionReason.REJECTED_QUEUE_FULL,
            budget="target_ttft_ms",
            needed=max(1, ceil(1000 * own_s)),
            available=max(0, floor(1000 * (target_s - before_s))),
            limit=self._roster.budget.target_ttft_ms,
            retry_after_s=self._retry_when_early(client, late_s, now),
            message="those ahead of it would let its first token come too late",
        )

    def _retry_when_early(self, client: str, late_s: float, now: float) -> float:
        """Those who were refused come back one after the other, as the prompts ahead and then theirs have run."""
        tick_s = max(self._retry.tick_s, _SHORTEST_TICK_S)
        return round(self._retry.promise(client, [ceil(late_s / tick_s)], self._estimate.typical_s() / tick_s, now), 3)

    def _resumes(self, job: Job) -> bool:
        """Whether the job was accepted before; no more can have been than slots and queue hold."""
        budget = self._roster.budget
        return job.resumed and len(self._roster.queue) < budget.max_active + budget.queue_depth

    def _retry_after(self, client: str, now: float) -> float:
        return round(self._retry.promise(client, self._remaining(), self._mean_job(), now), 3)

    def _next_slot_s(self) -> float:
        """Seconds until a slot opens for a new request, behind those that wait for one."""
        return self._retry.opens_in(self._remaining(), self._mean_job(), len(self._roster.queue))

    def _remaining(self) -> list[int]:
        """Ticks that each running session still needs."""
        sharing = self._roster.sharing
        return [int(sharing * self._ticks_left(session)) for session in self._roster.running()]

    def _mean_job(self) -> float:
        """Ticks of a typical session."""
        head = self._roster.queue.head()
        jobs = [session.job for session in self._roster.running()] if head is None else [head.job]
        return sum(job.max_new_tokens for job in jobs) / max(len(jobs), 1)

    def _ticks_left(self, session: Session) -> int:
        chunk = self._roster.budget.max_prefill_tokens_per_tick
        prefill = -(-max(session.prefill_left, 0) // chunk)
        return prefill + session.job.max_new_tokens - session.tokens_planned

    # ---- groups

    def _withdraw(self, accepted: Sequence[Session]) -> None:
        """Undo the acceptances of a group that another member spoiled; nothing was planned for them yet."""
        for session in accepted:
            self._roster.end(session)
            self.forget(session)

    def _refuse_together(
        self, jobs: Sequence[Job], spoiler: int, refusal: AdmissionDecision, now: float
    ) -> list[AdmissionDecision]:
        """The same refusal for all; it is time to come back when there is a place for the last of them."""
        retry_after_s = refusal.retry_after_s
        if retry_after_s is not None and refusal.budget != "target_ttft_ms":  # then only the first is waited for
            for job in jobs[spoiler + 1 :]:
                retry_after_s = self._retry_after(job.client, now)
        decisions = [
            msgspec.structs.replace(
                refusal,
                session_id=job.session_id,
                retry_after_s=retry_after_s,
                field=refusal.field if number == spoiler else "",
                message=refusal.message if number == spoiler else f"submitted together with {refusal.session_id!r}",
            )
            for number, job in enumerate(jobs)
        ]
        for decision in decisions:
            self._counters.reject(decision.reason)
        if not self._roster.sessions:
            self._retry.emptied()
        return decisions


def _refusal(session_id: str, reason: AdmissionReason, **explanation: object) -> AdmissionDecision:
    return AdmissionDecision(reason=reason, session_id=session_id, **explanation)  # type: ignore[arg-type]
