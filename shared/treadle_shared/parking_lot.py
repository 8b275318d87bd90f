"""The sequences that an engine has parked, and the moves of one tick into and out of their places."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from treadle_shared.engine import BatchEngine, ParkingEngine
from treadle_shared.errors import InvalidTick
from treadle_shared.ticks import RestoreRow, Tick


@dataclass(slots=True)
class SlotState:
    """What the runner knows of one sequence. ``ended``: rows for it are skipped until it is released. ``missing``: its
    KV was found to be gone. ``kept``: it is only copied from.
    """

    gen: int
    pos: int = 0
    ended: bool = False
    missing: bool = False
    kept: bool = False


@dataclass(slots=True)
class Moves:
    """A tick's checked moves; ``restored`` are the slots after it that a parked sequence came back to."""

    park: list[tuple[int, SlotState]] = field(default_factory=list)
    discard: list[int] = field(default_factory=list)
    restore: list[RestoreRow] = field(default_factory=list)
    restored: dict[int, SlotState] = field(default_factory=dict)


class ParkingLot:
    """Parked sequences by generation, with the slot they came from and how far they are.

    A tick that parks also releases the slot: what cannot be parked is gone then.
    """

    def __init__(self, engine: BatchEngine) -> None:
        self._engine = engine
        self._parks = engine if engine.facts.can_park and isinstance(engine, ParkingEngine) else None
        self._parked: dict[int, tuple[int, SlotState]] = {}

    @property
    def bytes_held(self) -> int:
        """Host memory of everything parked."""
        return 0 if self._parks is None else self._parks.parked_bytes

    def checked(
        self, tick: Tick, before: Mapping[int, SlotState], after: Mapping[int, SlotState], n_slots: int
    ) -> Moves:
        """The moves of a tick, nothing changed yet: out of the slots ``before`` it, into those that are free ``after``
        its releases. Raises InvalidTick.
        """
        if self._parks is None and (tick.park or tick.restore):
            raise InvalidTick("this engine cannot park")
        moves = Moves(discard=tick.discard, restore=tick.restore)
        released = set(tick.release)
        for slot, gen in tick.park:
            moves.park.append((slot, self._to_park(slot, gen, before, released)))
        if len({slot for slot, _ in tick.park}) < len(tick.park):
            raise InvalidTick("a slot is parked twice")
        for row in tick.restore:
            if row.slot >= n_slots or row.slot in after or row.slot in moves.restored:
                raise InvalidTick(f"slot {row.slot}: is not free for a parked sequence")
            moves.restored[row.slot] = SlotState(row.gen, self._to_restore(row, tick))
        return moves

    def take_in(self, moves: Moves, slots: dict[int, SlotState]) -> list[int]:
        """Park, out of ``slots``, and discard; the generations that could not be parked, and still are in a slot."""
        unparked = []
        for slot, held in moves.park:
            if self._parks is not None and not held.ended and self._parks.park(slot, held.gen):
                self._parked[held.gen] = slot, slots.pop(slot)
            else:
                unparked.append(held.gen)
        for gen in moves.discard:
            self._forget(gen)
        return unparked

    def let_out(self, moves: Moves) -> dict[int, SlotState]:
        """Restore; the slots that are taken by it. A state that is lost shows as a cache miss of its next row."""
        for row in moves.restore:
            slot, _ = self._parked.pop(row.parked)
            if self._parks is not None:
                self._parks.restore(slot, row.parked, row.slot, row.gen)
        return moves.restored

    def empty(self) -> None:
        """Forget every parked sequence."""
        for gen in list(self._parked):
            self._forget(gen)

    def _forget(self, gen: int) -> None:
        slot, _ = self._parked.pop(gen, (None, None))
        if slot is not None:
            self._engine.release(slot, gen)

    def _to_park(self, slot: int, gen: int, slots: Mapping[int, SlotState], released: set[int]) -> SlotState:
        held = slots.get(slot)
        if held is None or held.gen != gen or held.kept or gen in self._parked:
            raise InvalidTick(f"slot {slot}: generation {gen} is not there to be parked")
        if slot not in released:
            raise InvalidTick(f"slot {slot}: is parked but not released")
        return held

    def _to_restore(self, row: RestoreRow, tick: Tick) -> int:
        again = sum(other.parked == row.parked for other in tick.restore) > 1
        if row.parked not in self._parked or row.parked in tick.discard or again:
            raise InvalidTick(f"slot {row.slot}: no generation {row.parked} is parked")
        return self._parked[row.parked][1].pos
