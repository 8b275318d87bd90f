"""Runs ticks on an engine, and trusts none of them.

The runner keeps, for every slot, the generation, the next position and whether the sequence has ended, and
holds each tick against that before the engine sees it. It is the worker's engine thread without the thread,
and what the in-process scheduler runs on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import msgspec

from treadle_shared.engine import BatchEngine, CopyingEngine, CopyItem, DecodeItem, PrefillItem, StepResult
from treadle_shared.errors import DecodeFailed, InvalidTick, MalformedMessage
from treadle_shared.limits import MAX_DETAIL
from treadle_shared.parking_lot import Moves, ParkingLot, SlotState
from treadle_shared.ticks import CopyRow, DecodeRow, PrefillRow, ResultRow, Tick, TickResult, Timings
from treadle_shared.tokens import unpack_tokens

_Copy = tuple[CopyItem, SlotState]


@dataclass(slots=True)
class _Work:
    """A checked tick: what the engine runs, what is skipped, which slots get a new generation. ``after`` are the
    slots once every move is made.
    """

    after: dict[int, SlotState]
    keep: list[_Copy] = field(default_factory=list)
    copy: list[_Copy] = field(default_factory=list)
    decode: list[DecodeItem] = field(default_factory=list)
    prefill: list[PrefillItem] = field(default_factory=list)
    skipped: list[tuple[int, int]] = field(default_factory=list)
    opened: dict[int, SlotState] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)
    moves: Moves = field(default_factory=Moves)


class TickRunner:
    """One engine and its slots. ``run`` is called with one tick at a time, in order.

    After a tick that failed or was invalid, every tick is answered ``not_run`` until one is marked ``resync``.
    """

    def __init__(self, engine: BatchEngine, clock: Callable[[], float] = time.perf_counter) -> None:
        self._engine = engine
        self._facts = engine.facts
        self._clock = clock
        self._slots: dict[int, SlotState] = {}
        self._lot = ParkingLot(engine)
        self._broken = False

    def run(self, tick: Tick) -> Iterator[TickResult]:
        """The tick's result parts, each yielded as soon as it is known."""
        if self._broken and not tick.resync:
            yield self._refusal(tick, "an earlier tick failed")
            return
        self._broken = False
        try:
            work = self._checked(tick)
        except (InvalidTick, MalformedMessage) as error:
            self._broken = True
            yield self._refusal(tick, str(error), error_code=-1)
            return
        unparked = self._move(tick, work)
        for part in self._parts(tick, work):
            yield msgspec.structs.replace(part, unparked=unparked) if unparked else part
            unparked = []

    def reset(self) -> None:
        """Empty every slot: a new broker knows none of them."""
        for slot in list(self._slots):
            self._release(slot)
        self._lot.empty()
        self._broken = False

    def check(self) -> None:
        """Raise AssertionError where the engine holds rows that no slot accounts for."""
        rows = sum(slot.pos for slot in self._slots.values())
        assert self._engine.kv_tokens <= rows, f"engine holds {self._engine.kv_tokens} rows, slots {rows}"

    # ---- running

    def _move(self, tick: Tick, work: _Work) -> list[int]:
        """Make the tick's moves, in the order that Tick tells; the generations that could not be parked."""
        for item, slot in work.keep:
            self._release(int(item.session))
            self._copy(item, slot)
        unparked = self._lot.take_in(work.moves, self._slots)
        for number in tick.release:
            self._release(number)
        self._slots.update(self._lot.let_out(work.moves))
        for item, slot in work.copy:
            self._copy(item, slot)
        self._slots.update(work.opened)
        return unparked

    def _copy(self, item: CopyItem, slot: SlotState) -> None:
        """Copy, or leave a sequence whose rows are missing: no move may fail, for those before it are made."""
        try:
            slot.missing = not cast(CopyingEngine, self._engine).copy(item)
        except DecodeFailed:
            self._engine.release(item.session, item.epoch)
            slot.missing = True
        self._slots[int(item.session)] = slot

    def _parts(self, tick: Tick, work: _Work) -> Iterator[TickResult]:
        if work.decode or work.skipped or not work.prefill:
            part = self._part(tick, 0, lambda: self._engine.decode_batch(work.decode) if work.decode else [])
            self._advance(work.decode, part)
            yield self._closed(part, last=not work.prefill or self._broken, skipped=work.skipped)
        if work.prefill and not self._broken:
            part = self._part(tick, 1, lambda: self._engine.prefill(work.prefill))
            self._advance(work.prefill, part)
            yield self._closed(part, last=True)

    def _part(self, tick: Tick, part: int, call: Callable[[], list[StepResult]]) -> TickResult:
        start = self._clock()
        steps: list[StepResult] = []
        failure: DecodeFailed | None = None
        try:
            steps = call()
        except DecodeFailed as error:
            failure, self._broken = error, True
        total = self._clock() - start
        engine_s, sample_s = getattr(self._engine, "last_timings", (total, 0.0)) if steps else (0.0, 0.0)
        return TickResult(
            broker_id=tick.broker_id,
            worker_id=tick.worker_id,
            tick_id=tick.tick_id,
            part=part,
            rows=[_row(step) for step in steps],
            error=str(failure)[:MAX_DETAIL] if failure else "",
            error_code=failure.code if failure else 0,
            timings=Timings(engine_s, sample_s, total),
        )

    def _closed(self, part: TickResult, last: bool, skipped: Sequence[tuple[int, int]] = ()) -> TickResult:
        return msgspec.structs.replace(
            part,
            last=last,
            skipped=list(skipped),
            kv_tokens=self._engine.kv_tokens,
            parked_bytes=self._lot.bytes_held,
        )

    def _advance(self, items: Sequence[DecodeItem | PrefillItem], part: TickResult) -> None:
        for item, row in zip(items, part.rows, strict=not part.error):
            slot = self._slots[row.slot]
            slot.ended = row.eog or row.miss
            slot.missing = row.miss
            if not row.miss:
                slot.pos += len(item.tokens) if isinstance(item, PrefillItem) else 1

    def _release(self, slot: int) -> None:
        held = self._slots.pop(slot, None)
        if held is not None:
            self._engine.release(slot, held.gen)

    # ---- checks: nothing below changes a slot

    def _checked(self, tick: Tick) -> _Work:
        work = _Work(dict(self._slots))
        for move in tick.keep:
            self._add_keep(move, work)
        for number in tick.release:
            work.after.pop(number, None)
        if tick.park or tick.restore or tick.discard:
            work.moves = self._lot.checked(tick, self._slots, work.after, self._facts.max_sequences)
            work.after.update(work.moves.restored)
        for move in tick.copy:
            self._add_copy(move, work)
        for row in tick.decode:
            self._claim(row.slot, work.seen)
            self._add_decode(row, self._held(row.slot, row.gen, work), work)
        for chunk in tick.prefill:
            self._claim(chunk.slot, work.seen)
            self._add_prefill(chunk, work)
        return work

    def _add_keep(self, row: CopyRow, work: _Work) -> None:
        if row.params is not None:
            raise InvalidTick(f"slot {row.slot}: what is kept has no sampling parameters")
        there = work.after.get(row.slot)
        if there is not None and not there.kept:
            raise InvalidTick(f"slot {row.slot}: a sequence is there")
        work.keep.append(self._moved(row, work))

    def _add_copy(self, row: CopyRow, work: _Work) -> None:
        if row.params is None:
            raise InvalidTick(f"slot {row.slot}: a copied sequence carries no sampling parameters")
        if row.slot in work.after:
            raise InvalidTick(f"slot {row.slot}: generation {work.after[row.slot].gen} is still there")
        work.copy.append(self._moved(row, work))

    def _moved(self, row: CopyRow, work: _Work) -> _Copy:
        """The copy, once its source is found to hold what it needs."""
        if not self._facts.can_copy:
            raise InvalidTick(f"slot {row.slot}: the engine cannot copy sequences")
        if row.slot >= self._facts.max_sequences:
            raise InvalidTick(f"slot {row.slot}: the engine has {self._facts.max_sequences}")
        source = work.after.get(row.source)
        if source is None or source.gen != row.source_gen or row.source == row.slot:
            raise InvalidTick(f"slot {row.source}: generation {row.source_gen} is not there to be copied")
        if row.rows > source.pos and not source.missing:
            raise InvalidTick(f"slot {row.source}: {row.rows} rows to be copied, the engine is at {source.pos}")
        seen = unpack_tokens(row.seen)
        if seen and (min(seen) < 0 or max(seen) >= self._facts.n_vocab):
            raise InvalidTick(f"slot {row.slot}: a copied token is outside the vocabulary")
        slot = work.after[row.slot] = SlotState(row.gen, row.rows, kept=row.params is None)
        return CopyItem(row.source, row.source_gen, row.slot, row.gen, row.rows, row.params, seen), slot

    def _claim(self, slot: int, seen: set[int]) -> None:
        if slot >= self._facts.max_sequences:
            raise InvalidTick(f"slot {slot}: the engine has {self._facts.max_sequences}")
        if slot in seen:
            raise InvalidTick(f"slot {slot}: more than one row in a tick")
        seen.add(slot)

    def _held(self, number: int, gen: int, work: _Work) -> SlotState:
        slot = work.after.get(number)
        if slot is None or slot.gen != gen or slot.kept:
            raise InvalidTick(f"slot {number}: generation {gen} is not there")
        return slot

    def _add_decode(self, row: DecodeRow, slot: SlotState, work: _Work) -> None:
        if slot.ended:
            work.skipped.append((row.slot, row.gen))
            return
        if slot.pos != row.pos or row.pos == 0:
            raise InvalidTick(f"slot {row.slot}: decode at position {row.pos}, the engine is at {slot.pos}")
        if row.token >= self._facts.n_vocab:
            raise InvalidTick(f"slot {row.slot}: token {row.token} is not in the vocabulary")
        self._check_room(row.slot, row.pos + 1)
        token = None if row.token < 0 else row.token
        work.decode.append(DecodeItem(row.slot, row.gen, row.pos, token, row.sample))

    def _add_prefill(self, row: PrefillRow, work: _Work) -> None:
        tokens = unpack_tokens(row.tokens)
        if not tokens or min(tokens) < 0 or max(tokens) >= self._facts.n_vocab:
            raise InvalidTick(f"slot {row.slot}: a prefill of no tokens, or of one outside the vocabulary")
        self._check_room(row.slot, row.start + len(tokens))
        if row.start == 0:
            self._check_free(row, work)
            work.opened[row.slot] = SlotState(row.gen)
        else:
            slot = self._held(row.slot, row.gen, work)
            if slot.ended:
                work.skipped.append((row.slot, row.gen))
                return
            if slot.pos != row.start:
                raise InvalidTick(f"slot {row.slot}: prefill at {row.start}, the engine is at {slot.pos}")
        work.prefill.append(PrefillItem(row.slot, row.gen, row.start, tokens, row.sample, row.n_emitted, row.params))

    def _check_free(self, row: PrefillRow, work: _Work) -> None:
        if row.slot in work.after:
            raise InvalidTick(f"slot {row.slot}: generation {work.after[row.slot].gen} is still there")
        if row.params is None:
            raise InvalidTick(f"slot {row.slot}: the first chunk carries no sampling parameters")

    def _check_room(self, slot: int, tokens: int) -> None:
        if tokens > self._facts.context_tokens:
            raise InvalidTick(f"slot {slot}: {tokens} tokens do not fit {self._facts.context_tokens}")

    # ---- answers

    def _refusal(self, tick: Tick, why: str, error_code: int = 0) -> TickResult:
        return TickResult(
            broker_id=tick.broker_id,
            worker_id=tick.worker_id,
            tick_id=tick.tick_id,
            not_run=True,
            error=why[:MAX_DETAIL],
            error_code=error_code,
            kv_tokens=self._engine.kv_tokens,
            parked_bytes=self._lot.bytes_held,
        )


def _row(step: StepResult) -> ResultRow:
    token = -1 if step.token is None else step.token
    return ResultRow(int(step.session), step.epoch, token, step.eog, step.cache_miss, step.logprobs)
