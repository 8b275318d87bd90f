"""Finding the session that kills the engine.

A session gets a strike when a tick that held its row was lost and it has emitted nothing since the previous
loss. From the second strike it is a suspect: suspects run on trial by halves while everyone else waits, so that
a lone culprit among n suspects stands alone after log2(n) losses. One that dies alone twice is poison. A suspect
that emits a token, or ends, is cleared; when a whole half is cleared, the other half of its group is tried.
"""

from __future__ import annotations

from collections.abc import Iterable

from treadle_broker.session import Session

_SUSPECT_STRIKES = 2
_POISON_LONE_DEATHS = 2


class Suspects:
    """Suspects in the order they became so, the group that is on trial, and the narrowest one known to be guilty."""

    def __init__(self) -> None:
        self._suspects: dict[Session, None] = {}
        self._guilty: set[Session] = set()
        self._trial: set[Session] = set()

    @property
    def on_trial(self) -> bool:
        """Whether anybody is."""
        return bool(self._trial)

    def tries(self, session: Session) -> bool:
        """Whether the session is on trial: it is the next to get a slot, since others wait for the verdict."""
        return session in self._trial

    def may_run(self, session: Session) -> bool:
        """Whether the planner may give this session a row. A trial begins once one of its group has a slot."""
        return not self._trial or session in self._trial or not any(_on_trial(suspect) for suspect in self._trial)

    def crowded(self, running: Iterable[Session]) -> bool:
        """Whether a trial has to wait for rows of others in flight: who dies with its group would blur the verdict,
        and lose progress to it.
        """
        return bool(self._trial) and any(not self.may_run(session) for session in running)

    def lost(self, sessions: Iterable[Session]) -> list[Session]:
        """A tick with rows of these was lost; returns the ones that are poison."""
        there = [session for session in sessions if session.live]
        poisoned = self._count(there)
        for session in there:
            session.emitted_at_death = session.emitted
        for session in poisoned:
            del self._suspects[session]
        self._guilty = self._trial.intersection(there, self._suspects) or set(self._suspects)
        self._trial = self._half_of_guilty()
        return poisoned

    def clear(self, session: Session) -> None:
        """The session emitted a token or ended."""
        session.strikes = session.lone_deaths = 0
        if session not in self._suspects:
            return
        del self._suspects[session]
        self._guilty.discard(session)
        self._trial.discard(session)
        if not self._trial:
            self._guilty = self._guilty or set(self._suspects)
            self._trial = self._half_of_guilty()

    def check(self) -> None:
        """Raise AssertionError where a trial holds someone who is no suspect, or nobody while there are some."""
        assert self._trial <= self._guilty <= set(self._suspects)
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

    def _half_of_guilty(self) -> set[Session]:
        """Half of the guilty group, one of one; those with a slot first, since a trial of others cannot begin yet."""
        group = sorted((one for one in self._suspects if one in self._guilty), key=lambda one: one.slot is None)
        return set(group[: (len(group) + 1) // 2])


def _on_trial(suspect: Session) -> bool:
    """Whether it can run or, with its last row in flight and its slot given back, does."""
    return suspect.slot is not None or suspect.leaving
