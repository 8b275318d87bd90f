"""Which rows run in the next tick: decode first, then bounded prefill."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from treadle_broker.pace import PrefillPace
from treadle_broker.plan import PlannedDecode, PlannedPrefill
from treadle_broker.roster import Roster
from treadle_broker.session import Session

Row = tuple[PlannedDecode | PlannedPrefill, Session]


class Planner:
    """Picks rows and moves the sessions' planned counts on."""

    def __init__(self, roster: Roster, pace: PrefillPace) -> None:
        self._roster = roster
        self._pace = pace
        self._turns = 0

    def decodes(self) -> list[Row]:
        """The decode rows of a tick, in slot order."""
        roster = self._roster
        ready = [s for s in roster.slots.sessions() if s.wants_decode and roster.suspects.may_run(s)]
        if roster.budget.takes_turns:
            ready = [s for s in ready if roster.turns.has_room(s)]
        chosen = pick_decodes(ready, roster.budget.max_batch_size)
        for session in chosen:
            self._take_turn(session)
        return [self._decode(session) for session in sorted(chosen, key=_slot)]

    def prefills(self, beside_decodes: bool) -> list[Row]:
        """The prefill chunks of a tick, first come first; ``beside_decodes``: streams wait until they have run."""
        roster = self._roster
        waiting = (session for session in roster.prefilling() if roster.suspects.may_run(session))
        budget, min_rows = self._prefill_budget(beside_decodes), roster.facts.min_prefill_rows
        return [self._prefill(session, rows) for session, rows in pick_prefills(waiting, budget, min_rows)]

    def _prefill_budget(self, beside_decodes: bool) -> int:
        budget = self._roster.budget
        cap, target_ms = budget.max_prefill_tokens_per_tick, budget.target_itl_ms
        return self._pace.budget(cap, target_ms / 1000) if target_ms and beside_decodes else cap

    def _decode(self, session: Session) -> Row:
        slot = _slot(session)
        forced = session.replays_next
        sample = not forced or session.last_replay_next
        row = PlannedDecode(session.key, slot, session.gen, session.rows_planned, forced, sample)
        self._advance(session, slot, 1, sample)
        return row, session

    def _prefill(self, session: Session, rows: int) -> Row:
        slot = _slot(session)
        emitted = session.prefill_rows - session.job.prompt_tokens
        final = rows == session.prefill_left
        sample = final and emitted == session.replay
        row = PlannedPrefill(session.key, slot, session.gen, session.rows_planned, rows, sample, emitted)
        if final:
            self._take_turn(session)  # its first decode comes after those that wait already
            self._roster.prefilled(session)
        self._advance(session, slot, rows, sample)
        return row, session

    def _take_turn(self, session: Session) -> None:
        self._turns += 1
        session.last_turn = self._turns

    def _advance(self, session: Session, slot: int, rows: int, sample: bool) -> None:
        session.rows_planned += rows
        session.tokens_planned += sample
        self._roster.slots.add_rows(slot, rows)


def pick_decodes(ready: Sequence[Session], limit: int) -> list[Session]:
    """At most ``limit`` of the sessions that want a decode row.

    When there are more, those whose last turn lies furthest back, in that order, so that none starves and none is
    more than one row ahead.
    """
    if len(ready) <= limit:
        return list(ready)
    return sorted(ready, key=lambda session: session.last_turn)[:limit]


def pick_prefills(waiting: Iterable[Session], budget: int, min_rows: int) -> list[tuple[Session, int]]:
    """Chunks ``(session, rows)`` of at most ``budget`` prompt tokens in all; the first may always make progress.

    ``min_rows``: neither a chunk nor what it leaves of its prompt may be shorter (a shorter prompt is exempt).
    """
    chunks: list[tuple[Session, int]] = []
    left = budget
    for session in waiting:
        if left <= 0:
            break
        rows = chunk_rows(session.prefill_left, left, min_rows)
        if rows > left and chunks:
            break
        chunks.append((session, rows))
        left -= rows
    return chunks


def chunk_rows(remaining: int, budget: int, min_rows: int) -> int:
    """How many of ``remaining`` rows to run under ``budget``: the most that leaves no rest below ``min_rows``.

    May exceed ``budget`` where nothing smaller is legal.
    """
    rows = min(remaining, max(budget, min_rows))
    rest = remaining - rows
    if 0 < rest < min_rows:
        shorter = rows - (min_rows - rest)
        rows = shorter if shorter >= min_rows else remaining
    return rows


def _slot(session: Session) -> int:
    assert session.slot is not None
    return session.slot
