"""The tick log's records: one call of the scheduler each, with its inputs and a digest of what it decided.

A session is a number here, the how-manieth job of its file it was, and its client's and its own id are aliases.
There is no field that could hold a token, a text or a prompt; of prompts there are digests under a key that is never
written. Two records are equal where the same call decided
the same, so a replay makes the call again and compares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from typing import Any, Final

import msgspec

from treadle_broker.marks import Marks
from treadle_broker.plan import Emitted, Event, Finished, Plan, Promoted
from treadle_broker.session import Job, SessionKey
from treadle_shared.admission import AdmissionDecision, AdmissionReason
from treadle_shared.budget import NodeBudget
from treadle_shared.engine import EngineFacts
from treadle_shared.outcome import DoneReason
from treadle_shared.ticks import TickResult

FORMAT: Final = 5
STRANGER: Final = -1
"""The number of a session that no recorded call submitted: a broken log must not break the node."""
_EMITTED, _PROMOTED, _REBUILDING, _FINISHED = range(4)
_IDS: Final = ("client", "session_id")
_DEFAULTS: Final = {field.name: field.default for field in fields(Job) if field.name != "prefix"}

Scalar = str | int | float | bool | None
EventDigest = tuple[Any, ...]
"""``(kind, session, ...)``: emitted with its index, promoted with its wait, rebuilding, finished with reason, detail
and tokens."""


class Opened(msgspec.Struct, frozen=True, array_like=True, tag="opened"):
    """The first record of a file: how to build the scheduler that the rest is replayed on.

    ``number`` counts the files of one process from 0. ``counts`` are totals up to here, for the reader.
    """

    format: int
    number: int
    at: float
    budget: NodeBudget
    facts: EngineFacts
    depth: int
    recover_misses: bool
    ready: bool
    draining: bool
    marks: Marks
    counts: dict[str, int]


class Verdict(msgspec.Struct, frozen=True, array_like=True):
    """An AdmissionDecision without its texts."""

    reason: AdmissionReason
    epoch: int
    position: int
    budget: str
    needed: int
    available: int
    limit: int
    retry_after_s: float | None


class Submitted(msgspec.Struct, frozen=True, array_like=True, tag="submit"):
    """``jobs`` holds each job's fields that differ from their defaults, ``prefixes`` the digests of each prompt."""

    now: float
    jobs: list[dict[str, Scalar]]
    verdicts: list[Verdict]
    prefixes: list[bytes] = []


class LookedFull(msgspec.Struct, frozen=True, array_like=True, tag="full"):
    """``full_refusal`` that refused, and so promised a place."""

    now: float
    client: str
    prompt_tokens: int
    verdict: Verdict | None


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refuse"):
    """A refusal that was decided outside."""

    reason: AdmissionReason


class Drained(msgspec.Struct, frozen=True, array_like=True, tag="drain"):
    """No more submissions."""


class Cancelled(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """``cancel`` of a live session."""

    now: float
    session: int
    reason: DoneReason
    events: list[EventDigest]


class Stopped(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """``stop`` of a live session."""

    now: float
    session: int
    n_tokens: int
    reason: DoneReason
    events: list[EventDigest]


class Extended(msgspec.Struct, frozen=True, array_like=True, tag="extend"):
    """``extend`` of a live session."""

    session: int
    digests: bytes


class Expired(msgspec.Struct, frozen=True, array_like=True, tag="expire"):
    """``expire``."""

    now: float
    events: list[EventDigest]


class Planned(msgspec.Struct, frozen=True, array_like=True, tag="plan"):
    """``plan``; ``tick_id`` None where there was nothing to send.

    ``decode`` rows are ``(session, slot, gen, pos, forced, sample)``, ``prefill`` rows ``(session, slot, gen, start,
    n, sample, n_emitted)``, ``park`` ``(session, slot, gen)``, ``restore`` ``(session, slot, parked gen, gen)``.
    ``keep`` are ``(source, gen, slot, gen, rows)``, ``copy`` ``(session, source, gen, rows)``.
    """

    now: float
    tick_id: int | None = None
    resync: bool = False
    release: tuple[int, ...] = ()
    decode: list[tuple[int, int, int, int, bool, bool]] = []
    prefill: list[tuple[int, int, int, int, int, bool, int]] = []
    park: list[tuple[int, int, int]] = []
    restore: list[tuple[int, int, int, int]] = []
    discard: tuple[int, ...] = ()
    keep: list[tuple[int, int, int, int, int]] = []
    copy: list[tuple[int, int, int, int]] = []
    hold: bool = False


class Told(msgspec.Struct, frozen=True, array_like=True, tag="promoted"):
    """``take_promoted`` that had something to tell."""

    events: list[EventDigest]


class Completed(msgspec.Struct, frozen=True, array_like=True, tag="complete"):
    """``complete``. Rows are ``(slot, gen, eog, miss, has a token)``; ``kv_drift`` is what the ledger made of
    ``kv_tokens``, ``total_s`` how long the part took. What the engine says of its parked bytes decides nothing and is
    left out.
    """

    now: float
    tick_id: int
    part: int
    last: bool
    rows: list[tuple[int, int, bool, bool, bool]]
    skipped: list[tuple[int, int]]
    not_run: bool
    error: bool
    error_code: int
    kv_tokens: int
    events: list[EventDigest]
    kv_drift: int
    total_s: float
    unparked: list[int] = []


class WorkerReady(msgspec.Struct, frozen=True, array_like=True, tag="worker_ready"):
    """``worker_ready``."""

    now: float
    facts: EngineFacts
    budget: NodeBudget | None
    events: list[EventDigest]


class WorkerLost(msgspec.Struct, frozen=True, array_like=True, tag="worker_lost"):
    """``worker_lost``."""

    now: float
    events: list[EventDigest]


class Cut(msgspec.Struct, frozen=True, array_like=True, tag="cut"):
    """The file is full and the node was not at rest: what follows is in no file."""


Call = (
    Submitted
    | LookedFull
    | Refused
    | Drained
    | Cancelled
    | Stopped
    | Extended
    | Expired
    | Planned
    | Told
    | Completed
    | WorkerReady
    | WorkerLost
)
Record = Opened | Call | Cut


class Register:
    """Live sessions by number and by key; ``alias`` is what stands for a client's or a session's id."""

    def __init__(self, alias: Callable[[str], str]) -> None:
        self._alias = alias
        self._jobs = 0
        self._numbers: dict[SessionKey, int] = {}
        self._keys: dict[int, SessionKey] = {}

    def number(self, key: SessionKey) -> int | None:
        """A live session's number."""
        return self._numbers.get(key)

    def key(self, number: int) -> SessionKey | None:
        """The live session of a number."""
        return self._keys.get(number)

    def submitted(self, jobs: Sequence[Job], decisions: Sequence[AdmissionDecision], now: float) -> Submitted:
        """Every job takes a number, accepted or not: numbers do not depend on what was decided."""
        for number, (job, decision) in enumerate(zip(jobs, decisions, strict=True), self._jobs):
            if decision.accepted:
                key = SessionKey(job.client, job.session_id, decision.epoch)
                self._numbers[key] = number
                self._keys[number] = key
        self._jobs += len(jobs)
        verdicts = [verdict(decision) for decision in decisions]
        return Submitted(now, [self._lengths(job) for job in jobs], verdicts, [job.prefix for job in jobs])

    def planned(self, plan: Plan | None, now: float) -> Planned:
        """What ``plan`` decided."""
        if plan is None:
            return Planned(now)
        numbers = self._numbers
        return Planned(
            now,
            plan.tick_id,
            plan.resync,
            plan.release,
            [
                (numbers.get(row.key, STRANGER), row.slot, row.gen, row.pos, row.forced, row.sample)
                for row in plan.decode
            ],
            [
                (numbers.get(row.key, STRANGER), row.slot, row.gen, row.start, row.n, row.sample, row.n_emitted)
                for row in plan.prefill
            ],
            [(numbers.get(row.key, STRANGER), row.slot, row.gen) for row in plan.park],
            [(numbers.get(row.key, STRANGER), row.slot, row.parked, row.gen) for row in plan.restore],
            plan.discard,
            [(row.source, row.source_gen, row.slot, row.gen, row.rows) for row in plan.keep],
            [
                (STRANGER if row.key is None else numbers.get(row.key, STRANGER), row.source, row.source_gen, row.rows)
                for row in plan.copy
            ],
            plan.hold,
        )

    def completed(self, result: TickResult, events: Iterable[Event], kv_drift: int, now: float) -> Completed:
        """What ``complete`` made of a result. An EOG's and a missing row's token is no input, nor is any other."""
        return Completed(
            now,
            result.tick_id,
            result.part,
            result.last,
            [(row.slot, row.gen, row.eog, row.miss, row.token >= 0) for row in result.rows],
            result.skipped,
            result.not_run,
            bool(result.error),
            result.error_code,
            result.kv_tokens,
            self.happened(events),
            kv_drift,
            result.timings.total_s,
            result.unparked,
        )

    def happened(self, events: Iterable[Event], *, details: bool = True) -> list[EventDigest]:
        """Events by kind and session; ended sessions leave. ``details`` False: the caller chose those, not the
        scheduler.
        """
        numbers = self._numbers
        digests: list[EventDigest] = []
        for event in events:
            if isinstance(event, Emitted):
                digests.append((_EMITTED, numbers.get(event.key, STRANGER), event.index))
            elif isinstance(event, Finished):
                number = self._leave(event.key)
                digests.append((_FINISHED, number, event.reason.value, event.detail if details else "", event.tokens))
            elif isinstance(event, Promoted):
                digests.append((_PROMOTED, numbers.get(event.key, STRANGER), event.queued_s))
            else:
                digests.append((_REBUILDING, numbers.get(event.key, STRANGER)))
        return digests

    def _leave(self, key: SessionKey) -> int:
        number = self._numbers.pop(key, STRANGER)
        self._keys.pop(number, None)
        return number

    def _lengths(self, job: Job) -> dict[str, Scalar]:
        named = {name: getattr(job, name) for name in _DEFAULTS}
        aliases = {name: self._alias(named[name]) for name in _IDS}
        return {name: value for name, value in (named | aliases).items() if value != _DEFAULTS[name]}


def verdict(decision: AdmissionDecision) -> Verdict:
    """A decision without its texts."""
    return Verdict(
        decision.reason,
        decision.epoch,
        decision.position,
        decision.budget,
        decision.needed,
        decision.available,
        decision.limit,
        decision.retry_after_s,
    )
