"""The logical KV budget: what is reserved for live sessions and what they use of it, in tokens."""

from __future__ import annotations

from treadle_broker.session import Session


class Ledger:
    """Reservations under ``limit`` tokens, made when a session gets a slot and given back when it leaves it.

    Under the reserve policy they are made whole, under the optimistic one piece by piece.
    """

    def __init__(self) -> None:
        self._reserved: dict[Session, int] = {}
        self._total = 0

    @property
    def reserved(self) -> int:
        """Tokens reserved over all sessions."""
        return self._total

    @property
    def live_rows(self) -> int:
        """Rows that sessions with a reservation have planned so far."""
        return sum(session.rows_planned for session in self._reserved)

    def fits(self, tokens: int, limit: int) -> bool:
        """Whether another reservation fits."""
        return self._total + tokens <= limit

    def holds(self, session: Session) -> bool:
        """Whether the session has its reservation."""
        return session in self._reserved

    def reserve(self, session: Session, tokens: int | None = None) -> None:
        """Set aside ``tokens``, or the whole generation's."""
        assert session not in self._reserved
        self._reserved[session] = session.job.need_tokens if tokens is None else tokens
        self._total += self._reserved[session]

    def held_for(self, session: Session) -> int:
        """Tokens reserved for one session."""
        return self._reserved.get(session, 0)

    def extend(self, session: Session, tokens: int) -> None:
        """Set aside ``tokens`` more for a session."""
        self._reserved[session] += tokens
        self._total += tokens

    def give_back(self, session: Session) -> None:
        """End a reservation; none is no error."""
        self._total -= self._reserved.pop(session, 0)

    def check(self) -> None:
        """Raise AssertionError where the total is not the sum, or a session uses more than it reserved."""
        assert self._total == sum(self._reserved.values())
        assert all(session.rows_planned <= tokens for session, tokens in self._reserved.items())
