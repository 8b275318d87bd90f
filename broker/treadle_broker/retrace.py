"""A fresh scheduler that is led through the calls of a tick log."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, cast

from treadle_broker.scheduler import Scheduler
from treadle_broker.session import Job, SessionKey
from treadle_broker.tick_records import (
    Call,
    Cancelled,
    Completed,
    Drained,
    Expired,
    Extended,
    LookedFull,
    Opened,
    Planned,
    Refused,
    Register,
    Stopped,
    Submitted,
    Told,
    WorkerLost,
    WorkerReady,
    verdict,
)
from treadle_shared.admission import AdmissionDecision
from treadle_shared.ticks import ResultRow, TickResult, Timings

_NOBODY: Final = SessionKey("", "", -1)
_TOKEN: Final = 1  # stands for every token: the scheduler does not look at them


class Retrace:
    """Makes calls again, one by one."""

    def __init__(self, opened: Opened) -> None:
        self._scheduler = Scheduler(
            opened.budget, opened.facts, depth=opened.depth, recover_misses=opened.recover_misses
        )
        self._register = Register(str)
        if opened.ready:
            self._scheduler.worker_ready(opened.facts, opened.at)
        if opened.draining:
            self._scheduler.drain()
        self._scheduler.remember(opened.marks)
        self._calls: dict[type, Callable[[Any], Call]] = {
            Submitted: self._submit,
            LookedFull: self._look_full,
            Refused: self._refuse,
            Drained: self._drain,
            Cancelled: self._cancel,
            Stopped: self._stop,
            Extended: self._extend,
            Expired: self._expire,
            Planned: self._plan,
            Told: self._take_promoted,
            Completed: self._complete,
            WorkerReady: self._worker_ready,
            WorkerLost: self._worker_lost,
        }

    def again(self, record: Call) -> Call:
        """The record that the same call leaves now."""
        return self._calls[type(record)](record)

    def _submit(self, record: Submitted) -> Submitted:
        jobs = [
            Job(**cast(dict[str, Any], job), prefix=prefix)
            for job, prefix in zip(record.jobs, record.prefixes, strict=True)
        ]
        return self._register.submitted(jobs, self._scheduler.submit(jobs, record.now), record.now)

    def _look_full(self, record: LookedFull) -> LookedFull:
        refusal = self._scheduler.full_refusal(record.client, "", record.prompt_tokens, record.now)
        return LookedFull(
            record.now, record.client, record.prompt_tokens, None if refusal is None else verdict(refusal)
        )

    def _refuse(self, record: Refused) -> Refused:
        return Refused(self._scheduler.refuse(AdmissionDecision(reason=record.reason, session_id="")).reason)

    def _drain(self, record: Drained) -> Drained:
        self._scheduler.drain()
        return record

    def _cancel(self, record: Cancelled) -> Cancelled:
        events = self._scheduler.cancel(self._key(record.session), record.now, record.reason)
        return Cancelled(record.now, record.session, record.reason, self._register.happened(events, details=False))

    def _stop(self, record: Stopped) -> Stopped:
        events = self._scheduler.stop(self._key(record.session), record.n_tokens, record.reason, record.now)
        digests = self._register.happened(events, details=False)
        return Stopped(record.now, record.session, record.n_tokens, record.reason, digests)

    def _extend(self, record: Extended) -> Extended:
        self._scheduler.extend(self._key(record.session), record.digests)
        return record

    def _expire(self, record: Expired) -> Expired:
        return Expired(record.now, self._register.happened(self._scheduler.expire(record.now)))

    def _plan(self, record: Planned) -> Planned:
        return self._register.planned(self._scheduler.plan(record.now), record.now)

    def _take_promoted(self, record: Told) -> Told:
        return Told(self._register.happened(self._scheduler.take_promoted()))

    def _complete(self, record: Completed) -> Completed:
        result = _result(record)
        events = self._scheduler.complete(result, record.now)
        return self._register.completed(result, events, self._scheduler.kv_drift_rows, record.now)

    def _worker_ready(self, record: WorkerReady) -> WorkerReady:
        events = self._scheduler.worker_ready(record.facts, record.now, record.budget)
        return WorkerReady(record.now, record.facts, record.budget, self._register.happened(events))

    def _worker_lost(self, record: WorkerLost) -> WorkerLost:
        return WorkerLost(record.now, self._register.happened(self._scheduler.worker_lost(record.now)))

    def _key(self, number: int) -> SessionKey:
        return self._register.key(number) or _NOBODY


def _result(record: Completed) -> TickResult:
    return TickResult(
        broker_id="",
        worker_id="",
        tick_id=record.tick_id,
        part=record.part,
        last=record.last,
        rows=[ResultRow(slot, gen, _TOKEN if token else -1, eog, miss) for slot, gen, eog, miss, token in record.rows],
        skipped=record.skipped,
        not_run=record.not_run,
        error="recorded" if record.error else "",
        error_code=record.error_code,
        kv_tokens=record.kv_tokens,
        timings=Timings(total_s=record.total_s),
        unparked=record.unparked,
    )
