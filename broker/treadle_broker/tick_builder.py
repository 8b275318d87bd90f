"""From a plan, which knows lengths, to a tick, which carries tokens."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Protocol

from treadle_broker.plan import Plan, PlannedCopy, PlannedDecode, PlannedPrefill
from treadle_broker.session import SessionKey
from treadle_shared.sampling import SamplingParams
from treadle_shared.ticks import CopyRow, DecodeRow, PrefillRow, RestoreRow, Tick
from treadle_shared.tokens import pack_tokens


class Sequence(Protocol):
    """What a session's rows are filled from."""

    @property
    def sequence(self) -> array[int]:
        """Prompt tokens, then every emitted token; typecode ``i``."""
        ...

    @property
    def params(self) -> SamplingParams:
        """The session's sampling parameters, with a seed."""
        ...


def build_tick(plan: Plan, broker_id: str, worker_id: str, find: Callable[[SessionKey], Sequence]) -> Tick:
    """The wire form of a plan; ``find`` gives a planned session's tokens and parameters."""
    return Tick(
        broker_id=broker_id,
        worker_id=worker_id,
        tick_id=plan.tick_id,
        resync=plan.resync,
        release=list(plan.release),
        decode=[_decode(row, find) for row in plan.decode],
        prefill=[_prefill(row, find(row.key)) for row in plan.prefill],
        park=[(row.slot, row.gen) for row in plan.park],
        restore=[RestoreRow(row.slot, row.parked, row.gen) for row in plan.restore],
        discard=list(plan.discard),
        keep=[CopyRow(row.source, row.source_gen, row.slot, row.gen, row.rows) for row in plan.keep],
        copy=[_copy(row, find) for row in plan.copy],
        hold=plan.hold,
    )


def _copy(row: PlannedCopy, find: Callable[[SessionKey], Sequence]) -> CopyRow:
    assert row.key is not None, "only what is kept belongs to nobody"
    source = find(row.key)
    params = source.params
    window = params.penalty_last_n if params.penalised else 0
    seen = pack_tokens(source.sequence[max(row.rows - window, 0) : row.rows])
    return CopyRow(row.source, row.source_gen, row.slot, row.gen, row.rows, params, seen)


def _decode(row: PlannedDecode, find: Callable[[SessionKey], Sequence]) -> DecodeRow:
    token = find(row.key).sequence[row.pos] if row.forced else -1
    return DecodeRow(row.slot, row.gen, row.pos, token, row.sample)


def _prefill(row: PlannedPrefill, source: Sequence) -> PrefillRow:
    tokens = pack_tokens(source.sequence[row.start : row.start + row.n])
    params = source.params if row.start == 0 else None
    return PrefillRow(row.slot, row.gen, row.start, tokens, row.sample, row.n_emitted, params)
