"""Which rows run in the next tick: decode first, then bounded prefill."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from treadle_broker.pace import PrefillPace
from treadle_broker.plan import PlannedCopy, PlannedDecode, PlannedPrefill
from treadle_broker.prefix_map import Found
from treadle_broker.roster import Roster
from treadle_broker.session import Session

Row = tuple[PlannedDecode | PlannedPrefill, Session]


class Chunk(NamedTuple):
    """``rows`` prompt rows of a session, after what was found of its beginning elsewhere."""

    session: Session
    rows: int
    found: Found | None = None


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

    def prefills(self, decoding: int) -> list[Row]:
        """The prefill chunks of a tick, first come first. Who can start from another's prompt does so; who shares more
        with a prompt that is just being computed waits for it. ``decoding`` streams wait until they have run.
        """
        roster = self._roster
        waiting = [session for session in roster.prefilling() if roster.suspects.may_run(session)]
        budget, min_rows = self.prefill_budget(len(waiting), decoding), roster.facts.min_prefill_rows
        if decoding and len(waiting) == 1:
            budget = evenly(self.rows_to_run(waiting[0]), budget)
        return [self._prefill(chunk) for chunk in pick_prefills(waiting, budget, min_rows, self._find)]

    def rows_to_run(self, session: Session) -> int:
        """What is left of a session's prompt, but for what can be copied."""
        found = self._find(session)
        return session.prefill_left - (found.rows if found else 0)

    def _find(self, session: Session) -> Found | None:
        roster = self._roster
        if session.rows_planned or session.starts_alone:
            return None
        return roster.prefixes.find(session, roster.facts.min_prefill_rows, roster.suspects.may_run)

    def prefill_budget(self, waiting: int, decoding: int) -> int:
        """Prompt tokens of a tick where so many sessions wait for a first token, and so many stream.

        Beside streams the cap, and more, up to the burst, for two reasons: the more wait for each that streams, so
        that those that come together run together; and, within half a second, the more stream, whose decode takes
        longer too, so that a prefill takes some multiple of it whatever their number. Several bursts while nobody
        streams. All within what the longest tick, and a latency target, leave.
        """
        budget = self._roster.budget
        cap, burst = budget.max_prefill_tokens_per_tick, budget.burst_prefill_tokens_per_tick
        if not decoding:
            share = max(cap, burst, min(_BURSTS_ALONE * burst, _MOST_ALONE))
        else:
            crowd = burst * (waiting - 1) // decoding
            streams = self._pace.within(cap * decoding // _STREAMS_OF_CAP, _LONGEST_FOR_STREAMS_S)
            share = max(cap, min(burst, max(crowd, streams)))
            if budget.target_itl_ms:
                share = self._pace.budget(share, budget.target_itl_ms / 1000)
        return self._pace.within(share, self._roster.budget.longest_prefill_ms / 1000)

    def _decode(self, session: Session) -> Row:
        slot = _slot(session)
        forced = session.replays_next
        sample = not forced or session.last_replay_next
        row = PlannedDecode(session.key, slot, session.gen, session.rows_planned, forced, sample)
        self._advance(session, slot, 1, sample)
        return row, session

    def _prefill(self, chunk: Chunk) -> Row:
        session, rows, found = chunk
        slot = _slot(session)
        copy = self._begin(session, slot, found) if session.rows_planned == 0 else None
        emitted = session.prefill_rows - session.job.prompt_tokens
        final = rows == session.prefill_left
        sample = final and emitted == session.replay
        row = PlannedPrefill(session.key, slot, session.gen, session.rows_planned, rows, sample, emitted, copy)
        self._roster.prefixes.offer(session, rows + (copy.rows if copy else 0))
        if final:
            self._take_turn(session)  # its first decode comes after those that wait already
            self._roster.prefilled(session)
        self._advance(session, slot, rows, sample)
        return row, session

    def _begin(self, session: Session, slot: int, found: Found | None) -> PlannedCopy | None:
        """A session's first rows: those found elsewhere are as good as planned."""
        session.copied = 0
        if found is None:
            return None
        holder, session.copied = found.holder, found.rows
        session.copied_from = (holder.slot, holder.gen)
        self._roster.prefixes.use(holder)
        self._advance(session, slot, found.rows, False)
        return PlannedCopy(session.key, holder.slot, holder.gen, slot, session.gen, found.rows)

    def _take_turn(self, session: Session) -> None:
        self._turns += 1
        session.last_turn = self._turns

    def _advance(self, session: Session, slot: int, rows: int, sample: bool) -> None:
        session.rows_planned += rows
        session.tokens_planned += sample
        self._roster.slots.add_rows(slot, rows)


_BURSTS_ALONE = 4
_MOST_ALONE = 1 << 14  # tokens: 64 KiB in a frame

_STREAMS_OF_CAP = 10
"""The cap is for so many streams, and in proportion for more: among 32 of mixed lengths (Q4_K_M) 256 and 384 rows a
tick instead of 160 gave 1.08 to 1.16 of the throughput and 0.7 to 0.9 of the time to the first token."""

_LONGEST_FOR_STREAMS_S = 0.5
"""Where rows are dear (Q4_1: 3 ms each), larger chunks gain nothing, and streams would stand still for a second."""

_GRAIN = 16
"""Rows. Matrix kernels take them in groups of this size or a part of it, and what is left over at a higher price."""

_MAX_COPIES = 24
"""Beginnings copied in one tick: each may bring 16 KiB of tokens for the penalties and its parameters once more, and a
tick of every slot has to stay within a frame."""


def pick_decodes(ready: Sequence[Session], limit: int) -> list[Session]:
    """At most ``limit`` of the sessions that want a decode row.

    When there are more, those whose last turn lies furthest back, in that order, so that none starves and none is
    more than one row ahead.
    """
    if len(ready) <= limit:
        return list(ready)
    return sorted(ready, key=lambda session: session.last_turn)[:limit]


def evenly(rows: int, budget: int) -> int:
    """The size of chunks that run ``rows`` in as few ticks as ``budget`` allows, none much longer than the others: the
    longest is what streams wait for.
    """
    even = -(-rows // -(-rows // budget))
    return min(budget, -(-even // _GRAIN) * _GRAIN)


def _nothing(_session: Session) -> None:
    """Nothing of any prompt is to be had elsewhere."""


def pick_prefills(
    waiting: Iterable[Session], budget: int, min_rows: int, find: Callable[[Session], Found | None] = _nothing
) -> Iterator[Chunk]:
    """Chunks of at most ``budget`` prompt tokens in all; the first may always make progress.

    ``min_rows``: neither a chunk nor what it leaves of its prompt may be shorter (a shorter prompt is exempt). Each
    chunk is to be planned before the next is asked for: what ``find`` finds may depend on it.
    """
    left, first, copies = budget, True, 0
    for session in waiting:
        if left <= 0:
            return
        found = find(session)
        if found is not None and (found.wait or copies == _MAX_COPIES):
            continue
        copies += found is not None
        rows = chunk_rows(session.prefill_left - (found.rows if found else 0), left, min_rows)
        if rows > left and not first:
            return
        yield Chunk(session, rows, found)
        left, first = left - rows, False


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
