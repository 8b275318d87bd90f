"""Ticks that were sent and not yet answered."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile

from treadle_broker.plan import Plan
from treadle_broker.planner import Row
from treadle_broker.session import Session


@dataclass(slots=True)
class Sent:
    """One sent plan and what its answer is held against.

    ``open_rows`` maps ``(slot, gen)`` to the row and its session until the row is answered. ``kv_rows`` are live
    rows once the tick has run, ``physical_rows`` those the engine should then hold. ``void``: an earlier tick
    failed, so the engine refuses this one.
    """

    plan: Plan
    sent_at: float
    kv_rows: int
    physical_rows: int
    open_rows: dict[tuple[int, int], Row]
    void: bool = False

    def unanswered(self) -> list[Session]:
        """Live sessions with a row that was not answered and still counts."""
        rows = self.open_rows.items()
        return [session for (_, gen), (_, session) in rows if session.live and session.gen == gen]


class InFlight:
    """The sent plans, oldest first. ``depth`` 1: one at a time."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._sent: deque[Sent] = deque()

    def __len__(self) -> int:
        return len(self._sent)

    @property
    def lockstep(self) -> bool:
        """Whether each tick waits for the answer of the one before."""
        return self._depth == 1

    def full(self, ahead: int) -> bool:
        """Whether another tick has to wait: there is one to be answered, and ``ahead`` more to go on with. What follows
        a prompt is planned once it runs: whoever comes until then is in it.
        """
        if self.lockstep:
            return bool(self._sent)
        for place, sent in enumerate(self._sent):
            if sent.plan.prefill:
                return place > 0 or len(self._sent) > 1
        held_first = sum(1 for _ in takewhile(lambda sent: sent.plan.hold, self._sent))
        return len(self._sent) > held_first + ahead

    @property
    def held_last(self) -> int:
        """How many ticks sent last have answers that may wait for the next one's."""
        return sum(1 for _ in takewhile(lambda sent: sent.plan.hold, reversed(self._sent)))

    @property
    def prefills(self) -> bool:
        """Whether a prompt is being computed."""
        return any(sent.plan.prefill for sent in self._sent)

    @property
    def oldest(self) -> Sent | None:
        """The tick whose answer comes next."""
        return self._sent[0] if self._sent else None

    def push(self, sent: Sent) -> None:
        """A plan was sent."""
        self._sent.append(sent)

    def retire(self) -> Sent:
        """The oldest tick is answered in full."""
        return self._sent.popleft()

    def running(self) -> Iterator[Session]:
        """Live sessions with an unanswered row that the engine will run."""
        return (session for sent in self._sent if not sent.void for session in sent.unanswered())

    def after_oldest(self) -> list[Sent]:
        """The ticks sent after the oldest one."""
        return list(self._sent)[1:]

    def drop_all(self) -> list[Sent]:
        """The engine is gone; every tick with it."""
        dropped = list(self._sent)
        self._sent.clear()
        return dropped
