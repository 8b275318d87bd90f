"""Where sequences live in the split layout, and when one of them is better moved."""

from __future__ import annotations

from bisect import bisect, insort
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple


class Move(NamedTuple):
    """What lives in ``source`` goes to ``target``, which is free."""

    source: int
    target: int


class Places:
    """``count`` places, numbered as llama.cpp numbers sequences, the first ``sessions`` of them for those that decode;
    which of them are free.

    llama.cpp runs a batch as one only over consecutive places, and reads all weights once more for each further run of
    them. A sequence that ends leaves a gap, which a move closes; ``price`` is what a move costs, in such runs. As
    nobody knows how long a gap would stay, it is closed once it has cost as much as closing it: that is never more than
    twice the least possible (ski rental; Karlin, Manasse, Rudolph, Sleator, "Competitive snoopy caching", 1988).
    """

    def __init__(self, count: int, sessions: int, price: float) -> None:
        self._sessions = sessions
        self._price = price
        self._free = list(range(count))
        self._owed = 0.0
        self._above = 0

    def take(self, *, decodes_next: bool) -> int:
        """A place for a new sequence: the lowest, or, for one that decodes later, the lowest above all that decode."""
        later = (place for place in self._free if self._above <= place < self._sessions)
        place = self._free[0] if decodes_next else next(later, self._free[0])
        self._free.remove(place)
        return place

    def take_last(self) -> int:
        """The highest place, for a sequence that never decodes: above those of sessions, unless these are too many."""
        return self._free.pop()

    def give_back(self, place: int) -> None:
        """It is empty again."""
        insort(self._free, place)

    def moved(self, move: Move) -> None:
        """A move was made."""
        self._free.remove(move.target)
        insort(self._free, move.source)

    def move_for(self, decoding: Sequence[int]) -> Move | None:
        """The move to make before a batch over these places, in rising order; None where nothing is free between them,
        or no move is worth it yet. Who is between them without decoding soon will, and stays.
        """
        lowest, highest = decoding[0], decoding[-1]
        self._above = highest + 1
        free = self._free[bisect(self._free, lowest) : bisect(self._free, highest)]
        if not free:
            self._owed = 0.0
            return None
        self._owed += sum(after - before > 1 for before, after in pairwise(decoding))
        if self._owed < self._price:
            return None
        self._owed = 0.0
        return self._best_move(decoding, set(range(lowest, self._above)).difference(free))

    def _best_move(self, decoding: Sequence[int], held: set[int]) -> Move | None:
        """Towards the consecutive places, each of them ``held`` or free, that most of those held are among."""
        usable, best = held.union(self._free), range(0)
        most = start = inside = 0
        for end in range(max(self._sessions, self._above)):
            inside += end in held
            if end not in usable:
                start, inside = end + 1, 0
            elif end - start == len(held):
                inside -= start in held
                start += 1
            if end - start + 1 == len(held) and inside > most:
                most, best = inside, range(start, end + 1)
        source = next((place for place in decoding if place not in best), None)
        target = next((place for place in best if place not in held), None)
        return None if source is None or target is None else Move(source, target)
