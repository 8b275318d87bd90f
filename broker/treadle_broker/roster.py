"""Everyone the node owes an answer, and where each of them sits."""

from __future__ import annotations

from treadle_broker.fair_queue import FairQueue
from treadle_broker.ledger import Ledger
from treadle_broker.prefix_map import PrefixMap
from treadle_broker.session import Session, SessionKey, State
from treadle_broker.slots import SlotTable
from treadle_broker.suspects import Suspects
from treadle_shared.budget import NodeBudget
from treadle_shared.engine import EngineFacts


class Roster:
    """Live sessions: waiting in the queue, seated in a slot, leaving with their last token in flight, or returning
    to a slot they lost. Every move of a session between those places is a method here.
    """

    def __init__(self, budget: NodeBudget, facts: EngineFacts) -> None:
        self.budget = budget
        self.facts = facts
        self.sessions: dict[SessionKey, Session] = {}
        self.queue = FairQueue()
        self.slots = SlotTable(self._places, len(self._cache_places))
        self.prefixes = PrefixMap(self.slots, budget.prefix_block_tokens)
        self.prefixes.reset(self._cache_places)
        self.ledger = Ledger()
        self.suspects = Suspects()
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
        """Slots that a session could take now, were it not for its KV."""
        return self._places - self.slots.used

    @property
    def _places(self) -> int:
        """Sessions that may hold a slot at once."""
        return min(self.budget.effective_active_cap, self.facts.max_sequences)

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
        """Whether somebody waits for a slot already."""
        return bool(self.queue or self._returning)

    def fits(self, session: Session) -> bool:
        """Whether a slot and the session's whole KV are to be had now."""
        return self.open_seats > 0 and self.ledger.fits(session.job.need_tokens, self.kv_limit)

    def can_ever_fit(self, session: Session) -> bool:
        """Whether an otherwise empty node could run the session."""
        return self._places > 0 and session.job.need_tokens <= min(self.facts.context_tokens, self.kv_limit)

    def prefilling(self) -> list[Session]:
        """Seated sessions with prompt rows still to run, first come first."""
        return list(self._prefilling)

    # ---- moving

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
        self._seat(session)

    def next_to_promote(self) -> Session | None:
        """The head of the queue, taken out of it, if it fits; sessions that lost their slot are seated first."""
        self._seat_returning()
        head = self.queue.head()
        if head is None or self._returning or not self.fits(head):
            return None
        self.queue.remove(head, served=True)
        return head

    def prefilled(self, session: Session) -> None:
        """Its last prompt row is planned."""
        del self._prefilling[session]

    def leave(self, session: Session) -> None:
        """Give back slot and reservation; the session may still wait for its last token."""
        self._prefilling.pop(session, None)
        self._returning.pop(session, None)
        self.ledger.give_back(session)
        if session.slot is not None:
            self.prefixes.depart(session)
            self.slots.vacate(session)

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
        self.prefixes.block = self.budget.prefix_block_tokens
        self.prefixes.reset(self._cache_places)
        self._seat_returning()

    def forget_engine(self) -> None:
        """The engine is gone, and every row with it."""
        self.slots.forget_engine()
        self.prefixes.reset(self._cache_places)

    def _seat_returning(self) -> None:
        while self._returning:
            session = min(self._returning, key=lambda one: not self.suspects.tries(one))
            if not self.fits(session):
                return
            del self._returning[session]
            self._seat(session)

    def _seat(self, session: Session) -> None:
        self.ledger.reserve(session)
        self.slots.assign(session)
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
        assert self.slots.used <= max(self._places, 0)
