"""Sessions whose turn is over: what became of their KV, and what the engine still has to be told of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from treadle_broker.moves import Moves
from treadle_broker.plan import Plan, PlannedCopy, PlannedPark, PlannedRestore
from treadle_broker.session import Session, SessionKey, State
from treadle_shared.engine import EngineFacts


@dataclass(slots=True)
class _Place:
    """Where a session's KV waits. ``settled``: the engine has answered that it is there."""

    gen: int
    settled: bool = False


class Parking:
    """Parked sessions, each with its KV kept by the engine in host memory, or dropped and computed anew later.

    ``bytes_held`` is the most that the engine may hold, counted until it has answered otherwise; ``engine_bytes`` what
    it last said. ``parks`` counts turns that ended this way, ``drops`` those of them that kept nothing.
    """

    def __init__(self) -> None:
        self.parks = 0
        self.drops = 0
        self.engine_bytes = 0
        self.bytes_held = 0
        self._places: dict[Session, _Place | None] = {}
        self._fresh: set[Session] = set()
        self._kept: dict[int, Session] = {}
        self._sizes: dict[int, int] = {}
        self._due_park: dict[int, PlannedPark] = {}
        self._due_restore: dict[SessionKey, PlannedRestore] = {}
        self._due_discard: set[int] = set()

    def __len__(self) -> int:
        return len(self._places)

    @property
    def due(self) -> bool:
        """Whether the next tick has something to park, restore or forget."""
        return bool(self._due_park or self._due_restore or self._due_discard)

    def keeps(self, session: Session) -> bool:
        """Whether the session's KV waits for it."""
        return self._places.get(session) is not None

    def may_return(self, session: Session) -> bool:
        """Whether a slot is of use to the session now: not in the tick that ends its turn, and not before the last
        rows of the turn are answered and the engine has its KV safe.
        """
        if session in self._fresh:
            return False
        place = self._places.get(session)
        return place is None or (place.settled and session.rows_planned == session.rows_done)

    # ---- turns

    def keep(self, session: Session, slot: int, size: int) -> None:
        """The session gives up ``slot``; its KV will wait in at most ``size`` bytes."""
        gen = session.gen
        self._places[session] = _Place(gen)
        self._fresh.add(session)
        self._kept[gen] = session
        self._sizes[gen] = size
        self.bytes_held += size
        self._due_park[gen] = PlannedPark(session.key, slot, gen)

    def drop(self, session: Session) -> None:
        """The session gives up its slot, and its KV with it."""
        self._fresh.add(session)
        self._drop(session)

    def _drop(self, session: Session) -> None:
        self.parks += 1
        self.drops += 1
        self._places[session] = None

    def restore(self, session: Session) -> None:
        """A kept session has a slot, under a new generation."""
        place = self._places.pop(session)
        assert place is not None
        assert session.slot is not None
        del self._kept[place.gen]
        self._due_restore[session.key] = PlannedRestore(session.key, session.slot, place.gen, session.gen)

    def forget(self, session: Session) -> None:
        """Whatever is kept for the session is not wanted any more; nothing is no error."""
        restore = self._due_restore.pop(session.key, None)
        if restore is not None:
            self._due_discard.add(restore.parked)
        place = self._places.pop(session, None)
        if place is not None:
            self._unkeep(place.gen)

    def _unkeep(self, gen: int) -> None:
        del self._kept[gen]
        if self._due_park.pop(gen, None) is None:
            self._due_discard.add(gen)
        else:
            self._freed(gen)

    # ---- ticks

    def take(self, release: tuple[int, ...] = (), keep: tuple[PlannedCopy, ...] = ()) -> Moves:
        """What the next tick parks, restores and discards, beside the slots it releases and the beginnings it keeps."""
        self._fresh.clear()
        if not self.due:
            return Moves(release, (), (), (), keep)
        parks, restores = tuple(self._due_park.values()), tuple(self._due_restore.values())
        taken = Moves(release, parks, restores, tuple(sorted(self._due_discard)), keep)
        self._due_park.clear()
        self._due_restore.clear()
        self._due_discard.clear()
        return taken

    def answered(self, plan: Plan, unparked: Iterable[int]) -> None:
        """The engine has made a plan's moves, but for generations that it could not park."""
        if not (plan.park or plan.restore or plan.discard):
            return
        missing = set(unparked) & {park.gen for park in plan.park}
        for park in plan.park:
            self._settle(park.gen, park.gen in missing)
        for gen in (*plan.discard, *(row.parked for row in plan.restore), *missing):
            self._freed(gen)

    def void(self, plan: Plan, sessions: Mapping[SessionKey, Session]) -> None:
        """The engine never made a plan's moves; those that are still wanted are due again."""
        for park in plan.park:
            if park.gen in self._kept:
                self._due_park[park.gen] = park
            else:
                self._freed(park.gen)  # it stayed in its slot, whose release is due again
        self._due_discard.update(plan.discard)
        for row in plan.restore:
            session = sessions.get(row.key)
            if session is not None and session.gen == row.gen:
                self._due_restore[row.key] = row
            else:
                self._due_discard.add(row.parked)

    def forget_engine(self) -> None:
        """The engine is gone, and everything it held."""
        for gen in list(self._kept):
            self._places[self._kept.pop(gen)] = None
        self._sizes.clear()
        self.bytes_held = self.engine_bytes = 0
        self.take()

    def _settle(self, gen: int, missing: bool) -> None:
        session = self._kept.get(gen)
        place = None if session is None else self._places[session]
        if session is None or place is None or place.settled:
            return
        if missing:
            del self._kept[gen]
            self._drop(session)
        else:
            self.parks += 1
            place.settled = True

    def _freed(self, gen: int) -> None:
        self.bytes_held -= self._sizes.pop(gen, 0)

    def check(self) -> None:
        """Raise AssertionError where the accounts of what is parked do not agree."""
        assert self.bytes_held == sum(self._sizes.values())
        assert {gen: session for session, place in self._places.items() if place for gen in [place.gen]} == self._kept
        assert set(self._kept) <= set(self._sizes)
        assert set(self._due_park) <= set(self._kept)
        assert self._due_discard.isdisjoint(self._kept)
        assert all(session.state is State.PARKED and session.slot is None for session in self._places)


def worth_keeping(facts: EngineFacts, session: Session, slots: int) -> bool:
    """Whether the session's KV is moved out and in again in less time than it takes to compute anew, by what the
    engine measured of itself, a decode tick with a row in each of ``slots``. Figures that it did not measure count as
    in favour.
    """
    if not facts.can_park or not facts.park_tokens_per_s or not facts.prefill_tokens_per_s:
        return facts.can_park
    decoded = session.tokens_planned if facts.replay_decode else 0
    prefilled = session.job.prompt_tokens + session.tokens_planned - decoded
    row_s = facts.decode_tick_s / slots
    anew_s = prefilled / facts.prefill_tokens_per_s + decoded * row_s
    return session.rows_planned / facts.park_tokens_per_s <= anew_s


def parked_size(facts: EngineFacts, session: Session) -> int:
    """The most bytes that the session's KV takes in host memory."""
    return facts.parked_bytes_each + session.rows_planned * facts.parked_bytes_per_token
