"""When the first token of a new request can be expected: admission by what the service-level objective still allows.

A request waits for its first token until every prompt that came before it has run, beside the streams. Under overload
slots and queue bound how many wait, but not how long: that depends on the machine. A node that takes whoever would be
late serves nobody in time (goodput collapse; see DAGOR in Zhou et al., "Overload Control for Scaling WeChat
Microservices", SoCC 2018), so it is better to say no at once.
"""

from __future__ import annotations

from treadle_broker.pace import PrefillPace
from treadle_broker.planner import Planner
from treadle_broker.roster import Roster
from treadle_broker.session import Session


class FirstTokenEstimate:
    """Lays prompt rows out over the ticks to come, by what ticks were measured to take. Costs the number of slots."""

    def __init__(self, roster: Roster, planner: Planner, pace: PrefillPace) -> None:
        self._roster = roster
        self._planner = planner
        self._pace = pace

    def rows_ahead(self) -> int:
        """Prompt rows that run before those of a new request, but for what sessions that began find computed
        elsewhere. All of the queue counts, whoever would overtake it.
        """
        begun = sum(self._planner.rows_to_run(session) for session in self._roster.prompts_begun())
        return begun + self._roster.queue.tokens

    def typical_s(self) -> float:
        """Seconds that a prompt takes which is like those ahead."""
        prompts = len(self._roster.prompts_begun()) + len(self._roster.queue)
        return self.after(-(-self.rows_ahead() // max(prompts, 1)))

    def rows_of(self, session: Session) -> int:
        """Prompt rows of a session that has not begun, but for what it finds computed elsewhere."""
        session.rebuild(self._roster.facts.replay_decode)  # as it will begin
        return self._planner.rows_to_run(session)

    def after(self, rows: int) -> float:
        """Seconds that so many prompt rows take beside those that stream; 0 before anything was measured."""
        streams = sum(session.wants_decode for session in self._roster.slots.sessions())
        chunk = self._planner.prefill_budget(len(self._roster.prefilling()) + 1, streams)
        ticks = -(-rows // chunk) if streams else 0
        return self._pace.expected(rows) + ticks * (self._pace.decode_s or 0.0)
