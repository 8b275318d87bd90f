"""Which answers leave together.

A tick's answer wakes the broker, and the broker's word every client that streams: on a machine whose processors the
model uses, each wake-up is time taken from the next batch. Where ticks are short, several answers therefore leave as
one, as network interfaces coalesce interrupts (Mogul and Ramakrishnan, "Eliminating Receive Livelock in an
Interrupt-driven Kernel", 1997). The ticks stay what they were; who waits for a first or a last token waits no longer.
"""

from __future__ import annotations

from collections.abc import Iterable

from treadle_broker.inflight import InFlight
from treadle_broker.pace import PrefillPace
from treadle_broker.plan import PlannedDecode
from treadle_broker.planner import Row
from treadle_broker.roster import Roster
from treadle_shared.limits import MAX_TOGETHER


class Coalescing:
    """Says of each tick whether its answer may wait for the next one's."""

    def __init__(self, roster: Roster, pace: PrefillPace, inflight: InFlight) -> None:
        self._roster = roster
        self._pace = pace
        self._inflight = inflight

    def holds(self, decode: Iterable[Row]) -> bool:
        """Whether the answer of a tick that only decodes may wait: as many as fit into ``coalesce_ms`` by measurement
        go together, where nobody's first token is due, no session is rebuilt and none ends.
        """
        inflight = self._inflight
        if inflight.lockstep or inflight.open_answer + 1 >= self._together():
            return False
        if self._roster.prefilling() or inflight.prefills:
            return False
        return all(_goes_on(row, session.leaving) for row, session in decode)

    def _together(self) -> int:
        decode_s = self._pace.decode_s
        limit_s = self._roster.budget.coalesce_ms / 1000
        if not limit_s or not decode_s:
            return 1
        return int(min(limit_s / decode_s, MAX_TOGETHER))


def _goes_on(row: object, leaving: bool) -> bool:
    return isinstance(row, PlannedDecode) and not row.forced and not leaving
