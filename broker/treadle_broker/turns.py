"""Turns in the slots, under the optimistic KV policy: who gives up a slot, when, and for whom."""

from __future__ import annotations

from typing import Protocol

from treadle_broker.ledger import Ledger
from treadle_broker.parking import Parking, parked_size, worth_keeping
from treadle_broker.session import Session, State
from treadle_broker.slots import SlotTable
from treadle_shared.budget import NodeBudget
from treadle_shared.engine import EngineFacts


class Seats(Protocol):
    """What turns are taken in: the roster."""

    budget: NodeBudget
    facts: EngineFacts
    slots: SlotTable
    ledger: Ledger
    parking: Parking

    @property
    def kv_limit(self) -> int: ...

    @property
    def open_slots(self) -> int: ...

    def next_to_return(self) -> Session | None: ...

    def seat_returning(self) -> None: ...

    def park(self, session: Session, *, size: int | None) -> None: ...


class Turns:
    """Ends turns. A turn lasts at least ``slice_tokens`` new tokens, and as long as nobody waits for its slot or KV.

    Those who wait form one line, nobody overtakes its head, and every turn but one that has only just begun can be
    ended for it: so everybody gets a turn after at most as many as stand ahead. Costs the number of slots.
    """

    def __init__(self, seats: Seats) -> None:
        self._seats = seats

    def first_room(self, session: Session) -> int:
        """KV tokens that are reserved with a slot: the whole generation or, where turns are taken, what the session
        holds and a slice more.
        """
        budget, job = self._seats.budget, session.job
        if not budget.takes_turns:
            return job.need_tokens
        held = job.prompt_tokens + max(session.tokens_planned, session.emitted)
        return min(job.need_tokens, held + budget.slice_tokens)

    def has_room(self, session: Session) -> bool:
        """Whether another row of a seated session is inside its reservation."""
        return session.rows_planned < self._seats.ledger.held_for(session)

    def make_room(self) -> None:
        """Before rows are planned: reserve more KV for sessions that have used up theirs. Where there is none, turns
        end until there is, that of the session itself if need be.
        """
        if not self._seats.budget.takes_turns:
            return
        for session in self._seats.slots.sessions():
            while session.slot is not None and session.wants_decode and not self.has_room(session):
                if not self._extend(session) and not self._park_for_room(session):
                    break

    def swap(self) -> None:
        """Where the head of the line cannot sit, end the turns that are in its way, the longest first; none where
        that would not be enough yet.
        """
        seats = self._seats
        waiting = seats.next_to_return() if seats.budget.takes_turns else None
        if waiting is None or not seats.parking.may_return(waiting):
            return
        ending = self._in_the_way_of(waiting)
        for session in ending:
            self._park(session)
        if ending:
            seats.seat_returning()

    def _in_the_way_of(self, waiting: Session) -> list[Session]:
        seats = self._seats
        slots = seats.open_slots
        room = seats.kv_limit - seats.ledger.reserved - self.first_room(waiting)
        ending: list[Session] = []
        for session in self._over():
            if slots > 0 and room >= 0:
                break
            ending.append(session)
            slots += 1
            room += seats.ledger.held_for(session)
        return ending if slots > 0 and room >= 0 else []

    def _over(self) -> list[Session]:
        """Sessions whose turn may end, the longest turn first."""
        least = self._seats.budget.slice_tokens
        over = [one for one in self._seats.slots.sessions() if _may_park(one) and one.turn_tokens >= least]
        return sorted(over, key=lambda session: -session.turn_tokens)

    def _extend(self, session: Session) -> bool:
        """Reserve a slice more, or what is left; False where that is nothing."""
        seats = self._seats
        wanted = min(seats.budget.slice_tokens, session.job.need_tokens - seats.ledger.held_for(session))
        tokens = min(wanted, seats.kv_limit - seats.ledger.reserved)
        if tokens <= 0:
            return False
        seats.ledger.extend(session, tokens)
        return True

    def _park_for_room(self, session: Session) -> bool:
        """End one turn so that ``session`` may go on, or its own; False where none may end yet."""
        over = self._over()
        if not over and not _may_park(session):
            return False
        self._park(over[0] if over else session)
        return True

    def _park(self, session: Session) -> None:
        seats = self._seats
        size = parked_size(seats.facts, session)
        kept = (
            worth_keeping(seats.facts, session, len(seats.slots))
            and seats.parking.bytes_held + size <= seats.budget.park_bytes
        )
        seats.park(session, size=size if kept else None)


def _may_park(session: Session) -> bool:
    """Whether a token of this turn is there, so that everybody who is parked has got on, and more are to come."""
    return session.state is State.DECODING and session.wants_decode and session.emitted > session.turn_start
