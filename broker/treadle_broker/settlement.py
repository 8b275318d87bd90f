"""What a tick's answer means: tokens for their sessions, rows for the ledger, or work to take back."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from treadle_broker.counters import Counters
from treadle_broker.inflight import InFlight, Sent
from treadle_broker.plan import Emitted, Event, Finished, PlannedDecode, PlannedPrefill, Rebuilding
from treadle_broker.roster import Roster
from treadle_broker.session import Session, State
from treadle_shared.outcome import DoneReason
from treadle_shared.ticks import ResultRow, TickResult

_MAX_MISSES = 3  # rebuilds without a token in between; further ones would only evict one another's KV again

Finish = Callable[[Session, DoneReason, str], Finished]


class Settlement:
    """Holds answers against the plans they answer. ``finish`` ends a session for good."""

    def __init__(
        self, roster: Roster, inflight: InFlight, counters: Counters, finish: Finish, *, recover_misses: bool
    ) -> None:
        self._roster = roster
        self._inflight = inflight
        self._counters = counters
        self._finish = finish
        self._recover_misses = recover_misses

    def ran(self, sent: Sent, result: TickResult, now: float) -> list[Event]:
        """A part that was run: every answered row is confirmed, every skipped one taken off the ledger."""
        events: list[Event] = []
        decoded = prefilled = 0
        for slot, gen in result.skipped:
            self._skipped(sent, slot, gen)
        for row in result.rows:
            planned, session = sent.open_rows.pop((row.slot, row.gen), (None, None))
            if planned is None or session is None:
                self._counters.stale_results += 1
                continue
            if row.miss:
                self._not_run(sent, planned)
                self._roster.prefixes.distrust(row.slot, row.gen)
            elif isinstance(planned, PlannedPrefill):
                prefilled += planned.n
            else:
                decoded += 1
            if session.live and session.gen == row.gen:
                events += self._confirm(session, planned, row)
        self._counters.ran(decoded, prefilled, now)
        return events

    def failed(self, sent: Sent, result: TickResult) -> Iterator[Event]:
        """A part that failed, or a tick that was refused: its sessions start anew, later ticks are void."""
        lost = [session for session in sent.unanswered() if _suspected(sent, session, result)]
        bystanders = [session for session in sent.unanswered() if session not in lost]
        sent.void = True
        if result.not_run:
            self._reissue(sent)
        self._roster.prefixes.void(sent.plan.keep)
        for later in self._inflight.after_oldest():
            self.void(later)
        for session in bystanders:
            self._never_opened(session)
        yield from self.lost(lost, f"tick failed: {result.error}")

    def closed(self, sent: Sent) -> Iterator[Event]:
        """The last part was taken; a row that no part answered is lost, so that its session cannot wait for ever."""
        missing = [] if sent.void else sent.unanswered()
        if missing:
            yield from self.lost(missing, "a row was not answered")

    def void(self, sent: Sent) -> None:
        """A tick the engine will refuse, or never saw: as if it had not been planned."""
        sent.void = True
        self._reissue(sent)
        self._roster.prefixes.void(sent.plan.keep)
        for session in sent.unanswered():
            self._roster.take_back(session)

    def lost(self, sessions: list[Session], why: str) -> Iterator[Event]:
        """A tick with rows of these was lost; those that keep killing the engine end as poison."""
        for session in sessions:
            self._roster.prefixes.withdraw(session)
        poisoned = self._roster.suspects.lost(sessions)
        for session in poisoned:
            yield self._finish(session, DoneReason.FAILED, "poison")
        yield from self.restart(sessions, why)

    def restart(self, sessions: list[Session], why: str) -> Iterator[Event]:
        """The KV of these is gone; what is still live of them starts anew."""
        for session in sessions:
            if session.live:
                self._roster.rebuild(session)
                yield Rebuilding(session.key, why)

    # ---- rows

    def _confirm(self, session: Session, planned: PlannedDecode | PlannedPrefill, row: ResultRow) -> list[Event]:
        if row.miss:
            return [self._missed(session)]
        if isinstance(planned, PlannedPrefill):
            self._prefilled(session, planned)
        else:
            session.rows_done += 1
        if not planned.sample:
            return []
        if row.eog:
            return [self._finish(session, DoneReason.STOP, "eog")]
        if session.state is not State.DECODING and session.state is not State.PARKED:
            session.move(State.DECODING)
        session.emitted += 1
        session.bind(self._roster.facts.recipe_fingerprint)
        session.misses = 0
        self._roster.suspects.clear(session)
        emitted = Emitted(session.key, session.emitted - 1, row.token, row.logprobs)
        if session.emitted < session.job.max_new_tokens:
            return [emitted]
        return [emitted, self._finish(session, DoneReason.LENGTH, "")]

    def _prefilled(self, session: Session, planned: PlannedPrefill) -> None:
        if session.rows_done == 0:
            self._counters.begun(session.prefill_rows, planned.start)
            session.cached = planned.start if session.cached is None else session.cached
        session.rows_done = planned.start + planned.n

    def _missed(self, session: Session) -> Event:
        self._counters.cache_misses += 1
        session.misses += 1
        self._roster.prefixes.withdraw(session)
        if session.copied and session.rows_done == 0:  # it has lost nothing of its own
            self._roster.prefixes.distrust(*session.copied_from)
            session.starts_alone = True  # a source that runs may miss again
        elif not self._recover_misses or session.misses > _MAX_MISSES:
            return self._finish(session, DoneReason.CACHE_MISS, "the KV was evicted")
        self._roster.rebuild(session)
        return Rebuilding(session.key, "cache_miss")

    def _skipped(self, sent: Sent, slot: int, gen: int) -> None:
        planned, session = sent.open_rows.pop((slot, gen), (None, None))
        if planned is None or session is None:
            self._counters.stale_results += 1
            return
        self._not_run(sent, planned)
        if session.live and session.gen == gen:  # nothing that was answered before explains it
            sent.open_rows[slot, gen] = planned, session

    def _not_run(self, sent: Sent, planned: PlannedDecode | PlannedPrefill) -> None:
        """The engine holds fewer rows than were expected, until the slot's release has been planned."""
        rows = planned.n if isinstance(planned, PlannedPrefill) else 1
        sent.physical_rows -= rows
        for later in self._inflight.after_oldest():
            if planned.slot in later.plan.release:
                return
            later.physical_rows -= rows
        self._roster.slots.add_rows(planned.slot, -rows)

    # ---- failures

    def _never_opened(self, session: Session) -> None:
        """Its prefill was not run, but a first chunk's slot is already taken in the engine."""
        fresh = session.rows_done == 0
        self._roster.take_back(session)
        if fresh and session.slot is not None:
            self._roster.slots.renew(session)
            self._roster.slots.mark_dirty(session.slot)

    def _reissue(self, sent: Sent) -> None:
        for slot in sent.plan.release:
            self._roster.slots.mark_dirty(slot)
        self._roster.parking.void(sent.plan, self._roster.sessions)


def _suspected(sent: Sent, session: Session, result: TickResult) -> bool:
    """Whether the failed batch held the session: prefill rows are not run after a failed decode part."""
    if result.not_run or result.part == 1:
        return True
    return any(isinstance(row, PlannedDecode) and held is session for row, held in sent.open_rows.values())
