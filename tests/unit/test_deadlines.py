"""Deadlines: which is next, who is due, and that the ended leave no trace."""

from __future__ import annotations

from hand_worker import job, key, node, planned, tick
from hypothesis import given
from hypothesis import strategies as st

from treadle_broker import Finished, Scheduler
from treadle_broker.deadlines import Deadlines
from treadle_broker.session import Job, Session, SessionKey, State
from treadle_shared.outcome import DoneReason


def _session(name: str, queue: float | None = None, total: float | None = None) -> Session:
    wanted = Job(client="ann", session_id=name, prompt_tokens=1, max_new_tokens=1, queue_deadline=queue, deadline=total)
    return Session(key=SessionKey("ann", name, 0), job=wanted, submitted_at=0.0)


def _ends(scheduler: Scheduler, now: float) -> dict[str, tuple[DoneReason, str]]:
    events = scheduler.expire(now)
    assert all(isinstance(event, Finished) for event in events)
    return {event.key.session_id: (event.reason, event.detail) for event in events if isinstance(event, Finished)}


def test_a_session_is_due_at_its_very_deadline_and_not_before() -> None:
    scheduler = node()
    scheduler.submit([job("a", deadline=5.0)], 0.0)
    assert scheduler.next_deadline() == 5.0
    assert _ends(scheduler, 4.999) == {}
    assert _ends(scheduler, 5.0) == {"a": (DoneReason.DEADLINE, "deadline")}
    assert scheduler.next_deadline() is None
    assert scheduler.telemetry(5.0).failed_total == 1


def test_a_queue_timeout_binds_only_while_the_session_waits() -> None:
    scheduler = node(max_active=1)
    scheduler.submit([job("a", queue_deadline=5.0), job("b", queue_deadline=5.0)], 0.0)
    assert _ends(scheduler, 9.0) == {"b": (DoneReason.DEADLINE, "queue_timeout")}
    assert scheduler.next_deadline() is None


def test_a_promoted_session_keeps_its_total_deadline() -> None:
    scheduler = node(max_active=1)
    scheduler.submit([job("a"), job("b", queue_deadline=5.0, deadline=8.0)], 0.0)
    scheduler.cancel(key("a"), 1.0)
    planned(scheduler, 2.0)
    assert scheduler.next_deadline() == 8.0
    assert _ends(scheduler, 8.0) == {"b": (DoneReason.DEADLINE, "deadline")}


def test_the_earlier_of_two_bounds_is_the_one_that_is_told() -> None:
    scheduler = node(max_active=1)
    scheduler.submit(
        [job("a"), job("b", queue_deadline=3.0, deadline=4.0), job("c", queue_deadline=4.0, deadline=3.0)], 0.0
    )
    assert _ends(scheduler, 9.0) == {
        "b": (DoneReason.DEADLINE, "queue_timeout"),
        "c": (DoneReason.DEADLINE, "deadline"),
    }


def test_an_ended_session_is_not_due_again() -> None:
    scheduler = node()
    scheduler.submit([job("a", deadline=5.0, new=1), job("b", deadline=6.0)], 0.0)
    tick(scheduler)
    scheduler.cancel(key("b"), 1.0)
    assert scheduler.next_deadline() is None
    assert _ends(scheduler, 10.0) == {}


def test_a_deadline_ends_a_session_while_the_worker_is_gone() -> None:
    scheduler = node()
    scheduler.submit([job("a", deadline=5.0)], 0.0)
    tick(scheduler)
    scheduler.worker_lost(1.0)
    assert _ends(scheduler, 5.0) == {"a": (DoneReason.DEADLINE, "deadline")}
    scheduler.check()


def test_entries_of_ended_sessions_do_not_pile_up() -> None:
    deadlines = Deadlines()
    for number in range(10_000):
        session = _session(f"s{number}", queue=1e6, total=1e9)
        deadlines.watch(session)
        session.move(State.DONE)
        deadlines.compact(live=0)
    assert len(deadlines._heap) <= 2 * 64 + 2


def test_compacting_loses_nobody_who_is_live() -> None:
    deadlines = Deadlines()
    live = [_session(f"live-{number}", total=float(number)) for number in range(50)]
    for session in live:
        deadlines.watch(session)
    for number in range(1000):
        session = _session(f"s{number}", total=0.5)
        deadlines.watch(session)
        session.move(State.DONE)
        deadlines.compact(live=len(live))
    assert [session for session, _ in deadlines.due(100.0)] == live


times = st.none() | st.integers(0, 20).map(float)


@given(st.lists(st.tuples(times, times, st.booleans()), max_size=20), st.integers(0, 21).map(float))
def test_the_due_are_exactly_those_whose_time_has_come(
    bounds: list[tuple[float | None, float | None, bool]], now: float
) -> None:
    deadlines = Deadlines()
    expected = set()
    for number, (queue, total, promoted) in enumerate(bounds):
        session = _session(f"s{number}", queue, total)
        deadlines.watch(session)
        if promoted:
            session.move(State.PREFILLING)
        counting = [at for at in (None if promoted else queue, total) if at is not None]
        if any(at <= now for at in counting):
            expected.add(session.key)
    seen = []
    for session, _ in deadlines.due(now):
        seen.append(session.key)
        session.move(State.DONE)
    assert len(seen) == len(set(seen))
    assert set(seen) == expected
