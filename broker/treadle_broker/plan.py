"""What the scheduler decides: plans for the engine and events for the clients."""

from __future__ import annotations

import msgspec

from treadle_broker.session import SessionKey
from treadle_shared.engine import TokenLogprobs
from treadle_shared.outcome import DoneReason


class PlannedCopy(msgspec.Struct, frozen=True, gc=False):
    """The first ``rows`` rows of slot ``source`` for slot ``slot``: of session ``key``, or (None) of the cache."""

    key: SessionKey | None
    source: int
    source_gen: int
    slot: int
    gen: int
    rows: int


class PlannedDecode(msgspec.Struct, frozen=True, gc=False):
    """One decode row. ``forced``: the row's token is the sequence's own at ``pos`` (a rebuilt session)."""

    key: SessionKey
    slot: int
    gen: int
    pos: int
    forced: bool
    sample: bool


class PlannedPrefill(msgspec.Struct, frozen=True, gc=False):
    """Rows ``start .. start+n-1`` of a sequence; the last ``n_emitted`` of all its prefilled rows are emitted ones.
    ``copy`` puts the rows before them there first.
    """

    key: SessionKey
    slot: int
    gen: int
    start: int
    n: int
    sample: bool
    n_emitted: int
    copy: PlannedCopy | None = None


class PlannedPark(msgspec.Struct, frozen=True, gc=False):
    """The session's KV leaves the slot for host memory; the slot is released by the same plan."""

    key: SessionKey
    slot: int
    gen: int


class PlannedRestore(msgspec.Struct, frozen=True, gc=False):
    """The KV parked as generation ``parked`` comes back into a slot."""

    key: SessionKey
    slot: int
    parked: int
    gen: int


class Plan(msgspec.Struct, frozen=True):
    """One tick: what is kept in the cache, sequences to park and parked ones to forget, slots to empty, sequences that
    come back, copies, decode rows in slot order, prefill chunks. ``hold``: its answer may wait for the next tick's.
    """

    tick_id: int
    resync: bool
    release: tuple[int, ...]
    decode: tuple[PlannedDecode, ...]
    prefill: tuple[PlannedPrefill, ...]
    park: tuple[PlannedPark, ...] = ()
    restore: tuple[PlannedRestore, ...] = ()
    discard: tuple[int, ...] = ()
    keep: tuple[PlannedCopy, ...] = ()
    hold: bool = False

    @property
    def copy(self) -> tuple[PlannedCopy, ...]:
        """Beginnings that new sequences take from others."""
        return tuple(row.copy for row in self.prefill if row.copy is not None)

    @property
    def runs(self) -> bool:
        """Whether the engine computes anything: a plan that only releases is not counted as a tick."""
        return bool(self.decode or self.prefill)

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens of this tick."""
        return sum(row.n for row in self.prefill)


class Promoted(msgspec.Struct, frozen=True):
    """A session left the queue: it holds a slot, or takes its turns in one from now on."""

    key: SessionKey
    queued_s: float


class Emitted(msgspec.Struct, frozen=True):
    """Token number ``index`` of a session's answer."""

    key: SessionKey
    index: int
    token: int
    logprobs: TokenLogprobs | None


class Rebuilding(msgspec.Struct, frozen=True):
    """A session's KV is gone; it is being rebuilt and will go on."""

    key: SessionKey
    why: str


class Finished(msgspec.Struct, frozen=True):
    """A session ended, with ``tokens`` in its answer. Nothing follows. ``cached`` of its prompt's tokens were not run
    but taken from another sequence.
    """

    key: SessionKey
    reason: DoneReason
    detail: str
    tokens: int
    cached: int = 0


Event = Promoted | Emitted | Rebuilding | Finished
