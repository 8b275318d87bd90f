"""Finding the session that kills the engine.

A session gets a strike when a tick that held its row was lost and it has emitted nothing since the previous
loss. From the second strike it is a suspect: suspects run on trial by halves while everyone else waits, so that
a lone culprit stands alone after a few losses. One that dies alone twice is poison. A suspect that emits a
token, or ends, is cleared.
"""

from __future__ import annotations

from collections.abc import Iterable

from treadle_broker.session import Session

_SUSPECT_STRIKES = 2
_POISON_LONE_DEATHS = 2


class Suspects:
    """Suspects in the order they became so, and the group that is on trial."""

    def __init__(self) -> None:
        self._suspects: dict[Session, None] = {}
        self._trial: set[Session] = set()

    def may_run(self, session: Session) -> bool:
        """Whether the planner may give this session a row. A trial begins once one of its group has a slot."""
        return not self._trial or session in self._trial or all(suspect.slot is None for suspect in self._trial)

    def lost(self, sessions: Iterable[Session]) -> list[Session]:
        """A tick with rows of these was lost; returns the ones that are poison."""
        there = [session for session in sessions if session.live]
        poisoned = self._count(there)
        for session in there:
            session.emitted_at_death = session.emitted
        for session in poisoned:
            del self._suspects[session]
        self._trial = self._next_trial(set(there))
        return poisoned

    def clear(self, session: Session) -> None:
        """The session emitted a token or ended."""
        session.strikes = session.lone_deaths = 0
        if session not in self._suspects:
            return
        del self._suspects[session]
        self._trial.discard(session)
        if not self._trial and self._suspects:
            self._trial = self._halved(set(self._suspects))

    def check(self) -> None:
        """Raise AssertionError where a trial holds someone who is no suspect, or nobody while there are some."""
        assert self._trial <= set(self._suspects)
        assert bool(self._trial) == bool(self._suspects)
        assert all(session.live for session in self._suspects)

    def _count(self, there: list[Session]) -> list[Session]:
        alone = len(there) == 1
        poisoned = []
        for session in there:
            if not session.fruitless:
                session.strikes = 0
                continue
            session.strikes += 1
            if session.strikes >= _SUSPECT_STRIKES:
                self._suspects[session] = None
                session.lone_deaths += alone
            if session.lone_deaths >= _POISON_LONE_DEATHS:
                poisoned.append(session)
        return poisoned

    def _next_trial(self, died: set[Session]) -> set[Session]:
        """Half of the group that died; one that died alone, alone again; else half of everyone suspected."""
        group = {session for session in self._trial & died if session in self._suspects}
        return group if len(group) == 1 else self._halved(group or set(self._suspects))

    def _halved(self, group: set[Session]) -> set[Session]:
        ordered = [session for session in self._suspects if session in group]
        return set(ordered[: (len(ordered) + 1) // 2])
