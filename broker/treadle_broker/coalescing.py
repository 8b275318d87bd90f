"""Which answers leave together.

A tick's answer wakes the broker, and the broker's word every client that streams: on a machine whose processors the
model uses, each wake-up is time taken from the next batch. Where ticks are short, several answers therefore leave as
one, as network interfaces coalesce interrupts (Mogul and Ramakrishnan, "Eliminating Receive Livelock in an
Interrupt-driven Kernel", 1997). The ticks stay what they were.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil
from typing import Final

from treadle_broker.inflight import InFlight
from treadle_broker.pace import PrefillPace
from treadle_broker.planner import Row
from treadle_broker.roster import Roster
from treadle_broker.session import Session
from treadle_shared.limits import MAX_TOGETHER

_TURN_S: Final = 0.005  # an answer's way to the broker and the next ticks' way back, with room to spare


class Coalescing:
    """Says of each tick whether its answer may wait for the next one's."""

    def __init__(self, roster: Roster, pace: PrefillPace, inflight: InFlight) -> None:
        self._roster = roster
        self._pace = pace
        self._inflight = inflight

    @property
    def ahead(self) -> int:
        """Ticks that the engine needs to go on with while an answer is dealt with."""
        decode_s = self._pace.decode_s
        if not self._limit_s or not decode_s:
            return 1
        return min(ceil(_TURN_S / decode_s), MAX_TOGETHER)

    def holds(self, decode: Iterable[Row]) -> bool:
        """Whether the answer of a tick that only decodes may wait: as many as fit into ``coalesce_ms`` by measurement
        go together, where nobody waits for a slot or for a first token, nobody is rebuilt, and nobody ends or may be
        ended by the text.
        """
        inflight, roster = self._inflight, self._roster
        if inflight.lockstep or inflight.held_last + 1 >= self._together:
            return False
        if roster.prefilling() or inflight.prefills or roster.anyone_waits:
            return False
        return all(_goes_on(session) for _, session in decode)

    @property
    def _together(self) -> int:
        decode_s = self._pace.decode_s
        return int(min(self._limit_s / decode_s, MAX_TOGETHER)) if decode_s else 1

    @property
    def _limit_s(self) -> float:
        budget = self._roster.budget
        return min(budget.coalesce_ms, budget.target_itl_ms or budget.coalesce_ms) / 1000


def _goes_on(session: Session) -> bool:
    """Whether another token follows for sure, as far as is known here, and none was put back just now."""
    replays = session.rows_planned <= session.job.prompt_tokens + session.replay
    return not (session.leaving or session.job.watched or replays)
