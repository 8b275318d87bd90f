"""The waiting room: priority first, then one from each client in turn, then arrival."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from treadle_broker.session import Session, SessionKey


class _Level:
    """Sessions of one priority: clients take turns, each one's sessions stay in order."""

    def __init__(self) -> None:
        self._clients: OrderedDict[str, OrderedDict[SessionKey, Session]] = OrderedDict()
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def push(self, session: Session) -> None:
        self._clients.setdefault(session.key.client, OrderedDict())[session.key] = session
        self._length += 1

    def head(self) -> Session:
        return next(iter(next(iter(self._clients.values())).values()))

    def remove(self, session: Session, *, served: bool) -> None:
        client = session.key.client
        line = self._clients[client]
        del line[session.key]
        self._length -= 1
        if not line:
            del self._clients[client]
        elif served:
            self._clients.move_to_end(client)

    def ahead_of_last(self, client: str) -> int:
        """How many are served before the last one in a client's line, if nobody comes or goes."""
        rounds = len(self._clients[client]) - 1
        ahead = 0
        this_round = 1  # clients whose turn comes before this one's are served once more
        for name, line in self._clients.items():
            if name == client:
                this_round = 0
            ahead += min(len(line), rounds + this_round)
        return ahead

    def in_order(self) -> Iterator[Session]:
        """The order in which the sessions would be served if nobody came or went."""
        turns = OrderedDict((client, iter(line.values())) for client, line in self._clients.items())
        while turns:
            for client in list(turns):
                session = next(turns[client], None)
                if session is None:
                    del turns[client]
                else:
                    yield session


class FairQueue:
    """Waiting sessions. ``in_order`` costs their number, ``ahead`` the number of their clients, all else a constant."""

    def __init__(self) -> None:
        self._levels: dict[int, _Level] = {}
        self._length = 0
        self._tokens = 0

    def __len__(self) -> int:
        return self._length

    @property
    def tokens(self) -> int:
        """Prompt tokens that wait."""
        return self._tokens

    def push(self, session: Session) -> None:
        """Append a session to its client's line."""
        self._levels.setdefault(session.job.priority, _Level()).push(session)
        self._length += 1
        self._tokens += session.job.prompt_tokens

    def head(self) -> Session | None:
        """Who is next; nobody overtakes it, even if it does not fit yet."""
        return self._levels[max(self._levels)].head() if self._levels else None

    def remove(self, session: Session, *, served: bool) -> None:
        """Take a session out; ``served`` passes the turn to the next client."""
        priority = session.job.priority
        level = self._levels[priority]
        level.remove(session, served=served)
        if not level:
            del self._levels[priority]
        self._length -= 1
        self._tokens -= session.job.prompt_tokens

    def ahead(self, newest: Session) -> int:
        """How many are served before the session that was pushed last, if nobody comes or goes."""
        priority = newest.job.priority
        higher = sum(len(level) for number, level in self._levels.items() if number > priority)
        return higher + self._levels[priority].ahead_of_last(newest.key.client)

    def in_order(self) -> Iterator[Session]:
        """Every waiting session, next one first. Costs its length."""
        for priority in sorted(self._levels, reverse=True):
            yield from self._levels[priority].in_order()
