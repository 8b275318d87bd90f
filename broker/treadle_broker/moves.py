"""What a plan does to sequences before it runs rows."""

from __future__ import annotations

from typing import NamedTuple

from treadle_broker.plan import PlannedCopy, PlannedPark, PlannedRestore


class Moves(NamedTuple):
    """Slots to empty, sequences to park, to restore, parked ones to forget, and beginnings to keep in cache slots."""

    release: tuple[int, ...]
    park: tuple[PlannedPark, ...]
    restore: tuple[PlannedRestore, ...]
    discard: tuple[int, ...]
    keep: tuple[PlannedCopy, ...] = ()

    @property
    def any(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.release or self.park or self.restore or self.discard or self.keep)
