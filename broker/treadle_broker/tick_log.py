"""A scheduler that writes down every call, so that its decisions can be made again from a file."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from treadle_broker.marks import Marks
from treadle_broker.plan import Event, Plan
from treadle_broker.scheduler import Scheduler
from treadle_broker.session import Job, SessionKey
from treadle_broker.tick_file import Appender, TickFile, framed
from treadle_broker.tick_records import (
    FORMAT,
    Cancelled,
    Cut,
    Drained,
    Expired,
    Extended,
    LookedFull,
    Opened,
    Planned,
    Record,
    Refused,
    Register,
    Stopped,
    Told,
    WorkerLost,
    WorkerReady,
    verdict,
)
from treadle_shared.admission import AdmissionDecision
from treadle_shared.budget import NodeBudget
from treadle_shared.config import NodeConfig
from treadle_shared.engine import EngineFacts
from treadle_shared.log import get_logger
from treadle_shared.outcome import DoneReason
from treadle_shared.ticks import TickResult

_FILES: Final = 2  # the present one and its predecessor share the bound
_CUT: Final = framed(Cut())
_ALIAS_BYTES: Final = 8  # 10^8 ids share one with a probability of 0.0003
_log = get_logger("tick_log")


class TickLog:
    """Records in order, within ``limit_bytes`` for the file and its predecessor together.

    ``recording`` is False where the present file is full, until ``begin``, or once the disk failed, for good.
    Of calls that decided nothing (``idle``), only the last of each kind before a record is written.
    """

    def __init__(self, file: Appender, limit_bytes: int) -> None:
        self.recording = False
        self.files = 0
        self._new_file_at = 0
        self._file: Appender | None = file
        self._limit = limit_bytes // _FILES - len(_CUT)
        self._idle: dict[type[Expired | Planned], float] = {}

    @property
    def wants_new_file(self) -> bool:
        """Whether a new file should begin as soon as the scheduler is at rest: this one is full, or half full."""
        return self._file is not None and (not self.recording or self._file.size > self._new_file_at)

    def begin(self, opened: Opened) -> None:
        """The first record of a file; of a new one where there is a file already."""
        if self._file is None:
            return
        try:
            if self.files:
                self._file.start_anew()
            self.files += 1
            self._idle.clear()
            self.recording = True
            self._append(framed(opened))
            self._new_file_at = (self._file.size + self._limit) // 2
        except OSError as error:
            self._fail(error)

    def idle(self, kind: type[Expired | Planned], now: float) -> None:
        """A call of this kind found nothing to do."""
        self._idle.pop(kind, None)  # so that the order stays that of the last calls
        self._idle[kind] = now

    def write(self, record: Record) -> None:
        """One more call."""
        data = framed(record)
        if self._idle:
            data = b"".join([framed(_nothing(kind, now)) for kind, now in self._idle.items()]) + data
            self._idle.clear()
        try:
            self._append(data)
        except OSError as error:
            self._fail(error)

    def close(self) -> None:
        """Write nothing more."""
        self.recording = False
        if self._file is not None:
            self._file.close()
            self._file = None

    def _append(self, data: bytes) -> None:
        assert self._file is not None
        if self._file.size + len(data) <= self._limit:
            self._file.append(data)
            return
        self.recording = False
        self._file.append(_CUT)
        _log.warning("tick_log_full", bytes=self._file.size, resumes="when no session is live")

    def _fail(self, error: OSError) -> None:
        """The log is given up; the node serves on."""
        self.close()
        _log.warning("tick_log_closed", error=error.strerror or str(error))


class RecordedScheduler(Scheduler):
    """A Scheduler whose calls go to a TickLog. It decides nothing otherwise.

    A new file begins only while the scheduler is at rest, so that each one can be replayed by itself. Ids are
    written as hashes under a key that lives and dies with this object.
    """

    def __init__(
        self, budget: NodeBudget, facts: EngineFacts, log: TickLog, *, depth: int = 2, recover_misses: bool = True
    ) -> None:
        super().__init__(budget, facts, depth=depth, recover_misses=recover_misses)
        self._depth = depth
        self._recover_misses = recover_misses
        self._salt = secrets.token_bytes(16)
        self._log = log
        self._begin_file(0.0)

    def submit(self, jobs: Sequence[Job], now: float) -> list[AdmissionDecision]:
        decisions = super().submit(jobs, now)
        if self._log.recording:
            self._log.write(self._register.submitted(jobs, decisions, now))
        return decisions

    def full_refusal(self, client: str, session_id: str, prompt_tokens: int, now: float) -> AdmissionDecision | None:
        refusal = super().full_refusal(client, session_id, prompt_tokens, now)
        if refusal is not None and self._log.recording:
            self._log.write(LookedFull(now, self._alias(client), prompt_tokens, verdict(refusal)))
        return refusal

    def refuse(self, decision: AdmissionDecision) -> AdmissionDecision:
        if self._log.recording:
            self._log.write(Refused(decision.reason))
        return super().refuse(decision)

    def drain(self) -> None:
        super().drain()
        if self._log.recording:
            self._log.write(Drained())

    def cancel(
        self, key: SessionKey, now: float, reason: DoneReason = DoneReason.CANCELLED, detail: str = ""
    ) -> list[Event]:
        events = super().cancel(key, now, reason, detail)
        number = self._register.number(key)
        if number is not None and self._log.recording:
            self._log.write(Cancelled(now, number, reason, self._register.happened(events, details=False)))
        return events

    def stop(self, key: SessionKey, n_tokens: int, reason: DoneReason, now: float, detail: str = "") -> list[Event]:
        events = super().stop(key, n_tokens, reason, now, detail)
        number = self._register.number(key)
        if number is not None and self._log.recording:
            digests = self._register.happened(events, details=False)
            self._log.write(Stopped(now, number, n_tokens, reason, digests))
        return events

    def extend(self, key: SessionKey, digests: bytes) -> None:
        super().extend(key, digests)
        number = self._register.number(key)
        if number is not None and self._log.recording:
            self._log.write(Extended(number, digests))

    def expire(self, now: float) -> list[Event]:
        events = super().expire(now)
        if events and self._log.recording:
            self._log.write(Expired(now, self._register.happened(events)))
        elif self._log.recording:
            self._log.idle(Expired, now)
        return events

    def plan(self, now: float) -> Plan | None:
        promoted = len(self._promoted)
        plan = super().plan(now)
        if plan is None and len(self._promoted) == promoted:
            self._rest(now)
        elif self._log.recording:
            self._log.write(self._register.planned(plan, now))
        return plan

    def take_promoted(self) -> list[Event]:
        events = super().take_promoted()
        if events and self._log.recording:
            self._log.write(Told(self._register.happened(events)))
        return events

    def complete(self, result: TickResult, now: float) -> list[Event]:
        events = super().complete(result, now)
        if self._log.recording:
            self._log.write(self._register.completed(result, events, self.kv_drift_rows, now))
        return events

    def worker_ready(self, facts: EngineFacts, now: float, budget: NodeBudget | None = None) -> list[Event]:
        events = super().worker_ready(facts, now, budget)
        if self._log.recording:
            self._log.write(WorkerReady(now, facts, budget, self._register.happened(events)))
        return events

    def worker_lost(self, now: float, why: str = "worker lost") -> list[Event]:
        events = super().worker_lost(now, why)
        if self._log.recording:
            self._log.write(WorkerLost(now, self._register.happened(events)))
        return events

    # ---- files

    def _rest(self, now: float) -> None:
        """Nothing was planned; where nothing is live either, a file may end here."""
        if self._log.recording:
            self._log.idle(Planned, now)
        if self._log.wants_new_file and self.at_rest:
            self._begin_file(now)

    def _begin_file(self, now: float) -> None:
        self._register = Register(self._alias)
        self._log.begin(
            Opened(
                format=FORMAT,
                number=self._log.files,
                at=now,
                budget=self._roster.budget,
                facts=self.facts,
                depth=self._depth,
                recover_misses=self._recover_misses,
                ready=self.ready,
                draining=self._admission.draining,
                marks=self._aliased_marks(),
                counts=self._counts(),
            )
        )

    def _aliased_marks(self) -> Marks:
        marks = self.marks()
        epochs = [(self._alias(client), self._alias(name), epoch) for client, name, epoch in marks.epochs]
        return msgspec.structs.replace(marks, epochs=epochs)

    def _counts(self) -> dict[str, int]:
        """Totals so far, for whoever reads the file."""
        counters = self._counters
        ends = {f"{bucket}_total": count for bucket, count in counters.ended.items()}
        return {"submitted_total": counters.submitted, "ticks_total": counters.ticks, **ends}

    def _alias(self, text: str) -> str:
        return hashlib.blake2b(text.encode(), digest_size=_ALIAS_BYTES, key=self._salt).hexdigest()


def make_scheduler(budget: NodeBudget, facts: EngineFacts, depth: int, log: TickLog | None) -> Scheduler:
    """A scheduler that writes to ``log``, or a plain one."""
    return Scheduler(budget, facts, depth=depth) if log is None else RecordedScheduler(budget, facts, log, depth=depth)


def open_tick_log(config: NodeConfig) -> TickLog | None:
    """The log that the configuration asks for. Raises ConfigError where its file cannot be made."""
    return TickLog(TickFile(Path(config.tick_log)), config.tick_log_bytes) if config.tick_log else None


def _nothing(kind: type[Expired | Planned], now: float) -> Record:
    return Planned(now) if kind is Planned else Expired(now, [])
