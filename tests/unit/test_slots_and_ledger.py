"""The slots and the KV ledger: lowest slot first, new generations, and accounts that add up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle_broker.ledger import Ledger
from treadle_broker.session import TRANSITIONS, IllegalTransition, Job, Session, SessionKey, State
from treadle_broker.slots import SlotTable


def _session(name: str = "a", prompt: int = 4, new: int = 8) -> Session:
    job = Job(client="ann", session_id=name, prompt_tokens=prompt, max_new_tokens=new)
    return Session(key=SessionKey("ann", name, 0), job=job, submitted_at=0.0)


def _seated(table: SlotTable, count: int) -> list[Session]:
    sessions = [_session(f"s{number}") for number in range(count)]
    for session in sessions:
        table.assign(session)
    return sessions


# ---- slots


def test_the_lowest_free_slot_is_taken_so_that_used_ones_stay_together() -> None:
    table = SlotTable(4)
    sessions = _seated(table, 4)
    for number in (2, 0, 3):
        table.vacate(sessions[number])
    newcomers = _seated(table, 2)
    assert [session.slot for session in newcomers] == [0, 2]
    assert table.sessions() == [newcomers[0], sessions[1], newcomers[1]]
    table.check()


def test_every_assignment_is_a_new_generation() -> None:
    table = SlotTable(1)
    gens = []
    for _ in range(5):
        (session,) = _seated(table, 1)
        gens.append(session.gen)
        table.renew(session)
        gens.append(session.gen)
        table.vacate(session)
    assert gens == sorted(set(gens))


def test_a_vacated_slot_is_released_once_in_order() -> None:
    table = SlotTable(3)
    sessions = _seated(table, 3)
    assert not table.releases_due
    for number in (2, 0):
        table.vacate(sessions[number])
        table.mark_dirty(number)
    assert table.releases_due
    assert table.take_releases() == (0, 2)
    assert table.take_releases() == ()
    assert not table.releases_due


def test_rows_stay_on_the_account_until_their_slot_is_released() -> None:
    table = SlotTable(2)
    sessions = _seated(table, 2)
    table.add_rows(0, 5)
    table.add_rows(1, 7)
    table.vacate(sessions[0])
    assert table.physical_rows == 12
    table.take_releases()
    assert table.physical_rows == 7
    table.add_rows(1, -2)
    table.set_rows(0, 1)
    assert table.physical_rows == 6
    table.forget_engine()
    assert table.physical_rows == 0


def test_a_resized_table_is_empty_and_keeps_counting_generations() -> None:
    table = SlotTable(1)
    (session,) = _seated(table, 1)
    table.add_rows(0, 3)
    table.vacate(session)
    table.resize(3)
    assert (len(table), table.free, table.used, table.physical_rows) == (3, 3, 0, 0)
    assert not table.releases_due
    newcomers = _seated(table, 3)
    assert [newcomer.slot for newcomer in newcomers] == [0, 1, 2]
    assert min(newcomer.gen for newcomer in newcomers) > session.gen
    table.check()


@given(st.lists(st.integers(0, 4), max_size=40))
def test_slots_and_sessions_agree_after_any_coming_and_going(steps: list[int]) -> None:
    table = SlotTable(3)
    held: list[Session] = []
    for step in steps:
        if step < 3 and step < len(held):
            table.vacate(held.pop(step))
        elif table.free:
            held.append(_session())
            free = set(range(3)) - {session.slot for session in held}
            table.assign(held[-1])
            assert held[-1].slot == min(free)
        table.check()
        assert (table.used, table.free) == (len(held), 3 - len(held))


def test_a_check_finds_a_session_that_believes_in_another_slot() -> None:
    table = SlotTable(2)
    (session,) = _seated(table, 1)
    session.slot = 1
    with pytest.raises(AssertionError):
        table.check()


# ---- ledger


def test_a_reservation_is_the_whole_generation() -> None:
    ledger, session = Ledger(), _session(prompt=4, new=8)
    ledger.reserve(session)
    assert ledger.reserved == 12
    assert ledger.holds(session)
    assert ledger.fits(8, limit=20)
    assert not ledger.fits(9, limit=20)


def test_giving_back_twice_is_no_error_and_gives_back_once() -> None:
    ledger, first, second = Ledger(), _session("a"), _session("b")
    ledger.reserve(first)
    ledger.reserve(second)
    ledger.give_back(first)
    ledger.give_back(first)
    assert ledger.reserved == 12
    assert not ledger.holds(first)


def test_live_rows_are_what_sessions_with_a_reservation_have_planned() -> None:
    ledger, session, other = Ledger(), _session("a"), _session("b")
    ledger.reserve(session)
    session.rows_planned, other.rows_planned = 5, 50
    assert ledger.live_rows == 5


def test_reserving_twice_is_a_bug() -> None:
    ledger, session = Ledger(), _session()
    ledger.reserve(session)
    with pytest.raises(AssertionError):
        ledger.reserve(session)


def test_a_check_finds_a_session_beyond_its_reservation() -> None:
    ledger, session = Ledger(), _session(prompt=1, new=1)
    ledger.reserve(session)
    ledger.check()
    session.rows_planned = 3
    with pytest.raises(AssertionError):
        ledger.check()


# ---- states


@pytest.mark.parametrize("source", list(State))
@pytest.mark.parametrize("target", list(State))
def test_only_the_drawn_transitions_are_legal(source: State, target: State) -> None:
    session = _session()
    session.state = source
    if target in TRANSITIONS[source]:
        session.move(target)
        assert session.state is target
    else:
        with pytest.raises(IllegalTransition):
            session.move(target)


def test_a_session_that_ended_never_moves_again() -> None:
    assert TRANSITIONS[State.DONE] == frozenset()
    assert all(State.DONE in targets for source, targets in TRANSITIONS.items() if source is not State.DONE)
