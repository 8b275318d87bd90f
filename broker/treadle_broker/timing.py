"""When work is best planned: early enough that the engine never waits, late enough to know who is there.

A tick that was sent takes nobody in any more. So beside one that prefills for long, the next is planned just before
that one ends; and where most of those who have a slot have just come, they wait for others a small part of what their
prefill takes: sessions that start together run in full batches to their end.
"""

from __future__ import annotations

from typing import Final

from treadle_broker.inflight import InFlight
from treadle_broker.pace import PrefillPace
from treadle_broker.planner import Planner
from treadle_broker.roster import Roster
from treadle_broker.session import Session

_AHEAD_S: Final = 0.05  # before its predecessor's end, by measurement, a tick is planned
_AHEAD: Final = 0.25  # and this share of the predecessor's time before it, for what the measurement is wrong
_GATHER: Final = 0.02  # of what their prefill takes, those who have just come wait for others; half of it, one alone
_GATHER_S: Final = 0.05  # and never longer


class Timing:
    """When to plan the next tick, and when to begin with new prompts, on the scheduler's clock; None for now."""

    def __init__(self, roster: Roster, planner: Planner, pace: PrefillPace, inflight: InFlight) -> None:
        self._roster = roster
        self._planner = planner
        self._pace = pace
        self._inflight = inflight

    def plan_at(self, last_result_at: float) -> float | None:
        """Just before the tick that runs is over, where it prefills for long."""
        running = self._inflight.oldest
        if running is None or running.void:
            return None
        takes_s = self._pace.expected(running.plan.prefill_tokens)
        if takes_s <= _AHEAD_S:
            return None
        return max(running.sent_at, last_result_at) + takes_s - max(_AHEAD_S, _AHEAD * takes_s)

    def prefill_at(self) -> float | None:
        """When those who have just come have waited for others, where others like them could come in."""
        fresh = self._roster.prefilling()
        streams = self._roster.slots.used - len(fresh)
        if streams >= len(fresh) or any(session.rows_planned for session in fresh) or not self._is_room_like(fresh[0]):
            return None
        takes_s = self._pace.expected(sum(map(self._planner.rows_to_run, fresh)))
        share = _GATHER if len(fresh) > 1 else _GATHER / 2
        came = min(session.started_at or 0.0 for session in fresh)
        return came + min(share * takes_s, _GATHER_S)

    def _is_room_like(self, session: Session) -> bool:
        """Whether another session of its size would be seated at once."""
        return not self._roster.anyone_ahead and self._roster.can_sit(session)
