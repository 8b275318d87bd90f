"""Everyone the node owes an answer, and where each of them sits."""

from __future__ import annotations

from treadle_broker.fair_queue import FairQueue
from treadle_broker.ledger import Ledger
from treadle_broker.moves import Moves
from treadle_broker.parking import Parking
from treadle_broker.prefix_map import PrefixMap
from treadle_broker.session import Session, SessionKey, State
from treadle_broker.slots import SlotTable
from treadle_broker.suspects import Suspects
from treadle_broker.turns import Turns
from treadle_shared.budget import NodeBudget
from treadle_shared.engine import EngineFacts
from treadle_shared.limits import MAX_SEQUENCES

_MOST_KEPT = 8
"""Sequences kept in a tick while somebody decodes: a copy moves a whole sequence's KV in memory, and everybody's next
token waits for it."""


class Roster:
    """Live sessions: waiting in the queue, seated in a slot, leaving with their last token in flight, or returning
    to a slot they lost. Every move of a session between those places is a method here.

    Where sessions take turns, everybody who left the queue and has no slot is returning: new ones, parked ones, and
    those that have to be rebuilt, in one line.
    """

    def __init__(self, budget: NodeBudget, facts: EngineFacts) -> None:
        self.budget = budget
        self.facts = facts
        self.sessions: dict[SessionKey, Session] = {}
        self.queue = FairQueue()
        self.slots = SlotTable(self._places, len(self._cache_places))
        self.prefixes = PrefixMap(self.slots)
        self._reset_prefixes()
        self.ledger = Ledger()
        self.suspects = Suspects()
        self.parking = Parking()
        self.turns = Turns(self)
        self._returning: dict[Session, None] = {}
        self._prefilling: dict[Session, None] = {}
        self._active = 0

    # ---- looking

    @property
    def active(self) -> int:
        """Sessions that left the queue and have not ended."""
        return self._active

    @property
    def kv_limit(self) -> int:
        """Tokens that may be reserved."""
        return self.budget.kv_bytes // self.facts.kv_bytes_per_token

    @property
    def open_seats(self) -> int:
        """Slots that a session could take now, were it not for its KV; sessions that could take turns with others."""
        if self.budget.takes_turns:
            return self.budget.effective_active_cap - self._active
        return self.open_slots

    @property
    def open_slots(self) -> int:
        """Slots that nobody holds."""
        return self._places - self.slots.used

    @property
    def sharing(self) -> float:
        """How many sessions take turns in one slot."""
        return max(1.0, self._active / max(1, self._places)) if self.budget.takes_turns else 1.0

    @property
    def _places(self) -> int:
        """Sessions that may hold a slot at once."""
        return min(self.budget.seats, self.facts.max_sequences)

    @property
    def _cache_places(self) -> range:
        """Slots that may keep what finished sessions left: above those that sessions hold."""
        places = max(self._places, 0)
        spare = min(self.budget.cache_slots, self.facts.max_sequences - places)
        return range(places, places + spare if self.facts.can_copy else places)

    @property
    def cache_room(self) -> int:
        """Rows that may be kept beside what is reserved."""
        return self.kv_limit - self.ledger.reserved

    @property
    def anyone_ahead(self) -> bool:
        """Whether somebody waits for a slot already; where turns are taken, whether somebody waits for a turn."""
        return bool(self.queue or (self._returning and not self.budget.takes_turns))

    @property
    def anyone_waits(self) -> bool:
        """Whether somebody waits for a slot or for a turn in one."""
        return bool(self.queue or self._returning)

    def fits(self, session: Session) -> bool:
        """Whether a slot and the session's whole KV are to be had now; where turns are taken, one of the turns."""
        if self.budget.takes_turns:
            return self.open_seats > 0
        return self.can_sit(session)

    def can_sit(self, session: Session) -> bool:
        """Whether a slot and the KV that is reserved for the session in it are to be had now."""
        return self.open_slots > 0 and self.ledger.fits(self.turns.first_room(session), self.kv_limit)

    def can_ever_fit(self, session: Session) -> bool:
        """Whether an otherwise empty node could run the session."""
        return self._places > 0 and session.job.need_tokens <= min(self.facts.context_tokens, self.kv_limit)

    def running(self) -> list[Session]:
        """Sessions that hold a slot or, where turns are taken, have one now and then."""
        return [*self.slots.sessions(), *(self._returning if self.budget.takes_turns else ())]

    def prefilling(self) -> list[Session]:
        """Seated sessions with prompt rows still to run, first come first."""
        return list(self._prefilling)

    def prompts_begun(self) -> list[Session]:
        """Sessions that left the queue with prompt rows still to run, seated or waiting for a slot."""
        return [*self._prefilling, *(session for session in self._returning if session.prefill_left > 0)]

    # ---- moving

    @property
    def moves_due(self) -> bool:
        """Whether the engine has to be told of a sequence that left its place."""
        return self.slots.releases_due or self.parking.due

    def take_moves(self) -> Moves:
        """What the next tick does to sequences before it runs rows."""
        self.prefixes.shrink(self.cache_room)  # turns may have reserved more
        decoding = any(session.wants_decode for session in self.slots.sessions())
        keep = self.prefixes.keep_departed(self.cache_room, _MOST_KEPT if decoding else MAX_SEQUENCES)
        moves = self.parking.take(self.slots.take_releases(), keep)
        for row in moves.restore:
            self.slots.set_rows(row.slot, self.sessions[row.key].rows_planned)
        return moves

    def enter(self, session: Session) -> None:
        """A new session, not yet anywhere."""
        self.sessions[session.key] = session

    def wait(self, session: Session) -> None:
        """Into the queue."""
        self.queue.push(session)

    def promote(self, session: Session, now: float) -> None:
        """Into a slot, with its reservation made at once."""
        session.move(State.PREFILLING)
        session.started_at = now
        session.rebuild(self.facts.replay_decode)  # of a resumed session, what it had emitted comes back first
        self._active += 1
        if self.budget.takes_turns:
            self._returning[session] = None
            self.seat_returning()
        else:
            self._seat(session)

    def next_to_promote(self) -> Session | None:
        """The head of the queue, taken out of it, if it fits; sessions that lost their slot are seated first."""
        self.seat_returning()
        head = self.queue.head()
        if head is None or (self._returning and not self.budget.takes_turns) or not self.fits(head):
            return None
        self.queue.remove(head, served=True)
        return head

    def prefilled(self, session: Session) -> None:
        """Its last prompt row is planned."""
        del self._prefilling[session]

    def leave(self, session: Session) -> None:
        """Give back slot and reservation; the session may still wait for its last token."""
        self.parking.forget(session)
        self._prefilling.pop(session, None)
        self._returning.pop(session, None)
        self.ledger.give_back(session)
        if session.slot is not None:
            self.prefixes.depart(session)
            self.slots.vacate(session)

    def park(self, session: Session, *, size: int | None) -> None:
        """Its turn is over: out of its slot and to the end of the line. Its KV is kept in ``size`` bytes of host
        memory, or dropped.
        """
        slot = session.slot
        assert slot is not None
        session.move(State.PARKED)
        self.leave(session)
        if size is None:
            self.parking.drop(session)
        else:
            self.parking.keep(session, slot, size)
        self._returning[session] = None

    def end(self, session: Session) -> None:
        """Out of the node, wherever it was."""
        if session.state is State.QUEUED:
            self.queue.remove(session, served=False)
        else:
            self._active -= 1
        self.leave(session)
        session.move(State.DONE)
        self.suspects.clear(session)
        del self.sessions[session.key]

    def take_back(self, session: Session) -> None:
        """What was planned for it never ran: to where its confirmed rows put it."""
        if session.state is State.PARKED:
            session.void_planned()
            return
        if session.slot is None:  # its slot was given away when its last token was planned
            self.rebuild(session)
            return
        session.void_planned()
        if session.rows_done == 0:
            self.prefixes.withdraw(session)
        self.slots.set_rows(session.slot, session.rows_done)
        self._resume_prefill(session)

    def rebuild(self, session: Session) -> None:
        """Its KV is gone or unknown: start it anew, in its slot or in the next one that opens."""
        self.parking.forget(session)
        self.prefixes.withdraw(session)
        session.rebuild(self.facts.replay_decode)
        session.move(State.RECOVERING)
        if session.slot is None:
            session.gen = -1
            self._returning[session] = None
            return
        self.slots.renew(session)
        self.slots.mark_dirty(session.slot)
        self._resume_prefill(session)

    def reseat(self) -> None:
        """The engine is a new, empty one: seats are taken anew, first come first, as far as engine and budget go."""
        everyone = [*self.slots.sessions(), *self._returning]
        for session in everyone:
            self.leave(session)
            session.rebuild(self.facts.replay_decode)  # which may not have been known when it was seated
        self._returning = dict.fromkeys(sorted(everyone, key=lambda session: session.started_at or 0.0))
        self.slots.resize(self._places, len(self._cache_places))
        self._reset_prefixes()
        self.seat_returning()

    def forget_engine(self) -> None:
        """The engine is gone, and everything it held."""
        self.slots.forget_engine()
        self._reset_prefixes()
        self.parking.forget_engine()

    def _reset_prefixes(self) -> None:
        answers = not self.facts.replay_decode
        self.prefixes.reset(self._cache_places, self.budget.prefix_block_tokens, answers=answers)

    def next_to_return(self) -> Session | None:
        """Who gets the next slot, of those that left the queue and have none."""
        if not self.suspects.on_trial:
            return next(iter(self._returning), None)
        return min(self._returning, key=lambda one: not self.suspects.tries(one), default=None)

    def seat_returning(self) -> None:
        """Seat whoever returns, one after the other, as long as the next one fits."""
        while (session := self.next_to_return()) is not None:
            if not (self.can_sit(session) and self.parking.may_return(session)):
                return
            del self._returning[session]
            self._seat(session)

    def _seat(self, session: Session) -> None:
        if session.state is State.PARKED and not self.parking.keeps(session):
            self.parking.forget(session)
            session.rebuild(self.facts.replay_decode)
            session.move(State.RECOVERING)
        self.ledger.reserve(session, self.turns.first_room(session))
        self.slots.assign(session)
        if session.state is State.PARKED:
            session.move(State.DECODING)
            session.turn_start = session.tokens_planned
            self.parking.restore(session)
        else:
            self._prefilling[session] = None
            self.prefixes.touch(session)
        self.prefixes.shrink(self.cache_room)

    def _resume_prefill(self, session: Session) -> None:
        """Back among the prefilling, in the order in which they started."""
        if session.prefill_left > 0:
            self._prefilling[session] = None
            self._prefilling = dict(sorted(self._prefilling.items(), key=lambda item: item[0].started_at or 0.0))

    def check(self) -> None:
        """Raise AssertionError where two parts of the roster disagree."""
        self.slots.check()
        self.ledger.check()
        self.suspects.check()
        self.parking.check()
        self.prefixes.check()
        assert self.prefixes.rows <= max(self.cache_room, 0)
        seated = set(self.slots.sessions())
        everyone = set(self.sessions.values())
        queued = set(self.queue.in_order())
        assert len(queued) == len(self.queue)
        assert queued == {session for session in everyone if session.state is State.QUEUED}
        assert self._active == sum(session.active for session in everyone)
        assert len(everyone) == len(queued) + self._active
        assert seated <= everyone
        assert seated.isdisjoint(self._returning)
        assert {session for session in everyone if self.ledger.holds(session)} == seated
        assert set(self._prefilling) == {session for session in seated if session.prefill_left > 0}
        assert all(session.live and session.slot is None for session in self._returning)
        assert sum(session.state is State.PARKED for session in self._returning) == len(self.parking)
        assert len(self.parking) == sum(session.state is State.PARKED for session in everyone)
        assert self.slots.used <= max(self._places, 0)
