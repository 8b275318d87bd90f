"""The engine's sequence slots and what is reserved for the sessions in them."""

from __future__ import annotations

import heapq

from treadle_broker.session import Session


class SlotTable:
    """``n`` slots, lowest free one first: the engine batches consecutive slots best.

    The table also keeps the *physical* rows: what the engine holds once every planned tick has run, with rows of
    sessions that left until the release that empties their slot is planned. ``next_gen`` is the generation that
    the next assignment gets. ``cached`` slots above hold no sessions.
    """

    def __init__(self, n: int, cached: int = 0) -> None:
        self._sessions: list[Session | None] = [None] * n
        self._rows = [0] * (n + cached)
        self._free = list(range(n))
        self._to_release: set[int] = set()
        self.next_gen = 0

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def free(self) -> int:
        """How many slots a session can take now."""
        return len(self._free)

    @property
    def used(self) -> int:
        """How many slots hold a session."""
        return len(self._sessions) - len(self._free)

    @property
    def physical_rows(self) -> int:
        """KV rows over all slots, released ones not counted."""
        return sum(self._rows)

    @property
    def releases_due(self) -> bool:
        """Whether some slot has to be emptied in the engine."""
        return bool(self._to_release)

    def sessions(self) -> list[Session]:
        """The sessions that hold a slot, in slot order."""
        return [session for session in self._sessions if session is not None]

    def assign(self, session: Session) -> None:
        """Give the lowest free slot to a session, under a new generation."""
        slot = heapq.heappop(self._free)
        self._sessions[slot] = session
        session.slot = slot
        self.renew(session)

    def renew(self, session: Session) -> None:
        """A new generation for a session that keeps its slot: what the engine held under the old one is void."""
        session.gen = self.new_gen()

    def new_gen(self) -> int:
        """A generation that no slot had."""
        gen = self.next_gen
        self.next_gen += 1
        return gen

    def vacate(self, session: Session) -> None:
        """Take the slot back; the engine empties it with the next plan, before anything else uses it."""
        slot = session.slot
        assert slot is not None
        self._sessions[slot] = None
        session.slot = None
        heapq.heappush(self._free, slot)
        self.mark_dirty(slot)

    def mark_dirty(self, slot: int) -> None:
        """The engine may hold rows here that nobody wants."""
        self._to_release.add(slot)

    def take_releases(self) -> tuple[int, ...]:
        """Slots to empty at the start of the next tick, in order."""
        due = tuple(sorted(self._to_release))
        for slot in due:
            self._rows[slot] = 0
        self._to_release.clear()
        return due

    def add_rows(self, slot: int, rows: int) -> None:
        """Rows planned for a slot (or, negative, planned and skipped)."""
        self._rows[slot] += rows

    def set_rows(self, slot: int, rows: int) -> None:
        """Rows of a slot after a planned tick was void."""
        self._rows[slot] = rows

    def overwrite(self, slot: int, rows: int) -> None:
        """A cache slot gets new rows in place of what is there."""
        self._rows[slot] = rows
        self._to_release.discard(slot)

    def resize(self, n: int, cached: int = 0) -> None:
        """``n`` slots, and ``cached`` more, from now on, none of which holds a session or rows."""
        assert not self.used
        self._sessions = [None] * n
        self._rows = [0] * (n + cached)
        self._free = list(range(n))
        self.forget_engine()

    def forget_engine(self) -> None:
        """The engine is gone, and every row with it."""
        self._rows = [0] * len(self._rows)
        self._to_release.clear()

    def check(self) -> None:
        """Raise AssertionError where slots and sessions disagree."""
        used = {number for number, session in enumerate(self._sessions) if session is not None}
        assert used.isdisjoint(self._free)
        assert len(used) + len(self._free) == len(self._sessions)
        assert all(self._sessions[number].slot == number for number in used)  # type: ignore[union-attr]
        gens = [session.gen for session in self.sessions()]
        assert len(gens) == len(set(gens))
        assert all(rows >= 0 for rows in self._rows)
