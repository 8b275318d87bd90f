"""Suspects: strikes, trials by halves, and the verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from treadle_broker.session import Job, Session, SessionKey, State
from treadle_broker.suspects import Suspects


def _session(number: int, slot: bool = True) -> Session:
    job = Job(client="ann", session_id=f"s{number}", prompt_tokens=4, max_new_tokens=8)
    session = Session(key=SessionKey("ann", f"s{number}", 0), job=job, submitted_at=0.0, slot=number if slot else None)
    session.move(State.PREFILLING)
    return session


def _crowd(count: int) -> list[Session]:
    return [_session(number) for number in range(count)]


def _emit(suspects: Suspects, session: Session) -> None:
    session.emitted += 1
    suspects.clear(session)
    suspects.check()


def _lose(suspects: Suspects, sessions: Iterable[Session]) -> list[Session]:
    poisoned = suspects.lost(sessions)
    suspects.check()
    for session in poisoned:
        session.move(State.DONE)
        suspects.clear(session)
    return poisoned


def _may_run(suspects: Suspects, sessions: Iterable[Session]) -> list[Session]:
    return [session for session in sessions if session.live and suspects.may_run(session)]


def _search(suspects: Suspects, crowd: list[Session], deadly: Callable[[Session], bool]) -> int:
    """Run whoever may run until the deadly one is found; how many losses it took."""
    for losses in range(100):
        running = _may_run(suspects, crowd)
        while not any(map(deadly, running)):
            assert running, "nobody may run"
            for session in running:
                _emit(suspects, session)
            running = _may_run(suspects, crowd)
        poisoned = _lose(suspects, running)
        if poisoned:
            assert [deadly(session) for session in poisoned] == [True]
            return losses + 1
    raise AssertionError("never found")


# ---- strikes


def test_one_loss_makes_nobody_a_suspect() -> None:
    suspects, crowd = Suspects(), _crowd(4)
    assert _lose(suspects, crowd) == []
    assert _may_run(suspects, crowd) == crowd


def test_from_the_second_fruitless_loss_half_of_them_are_tried_while_everyone_else_waits() -> None:
    suspects, crowd = Suspects(), _crowd(6)
    for _ in range(2):
        _lose(suspects, crowd[:4])
    assert _may_run(suspects, crowd) == crowd[:2]
    assert [suspects.tries(session) for session in crowd] == [True, True, False, False, False, False]


def test_a_session_that_emitted_between_two_losses_has_no_strike() -> None:
    suspects, crowd = Suspects(), _crowd(2)
    for _ in range(4):
        _lose(suspects, crowd)
        for session in crowd:
            _emit(suspects, session)
    assert _may_run(suspects, crowd) == crowd


def test_what_was_emitted_before_the_first_loss_is_no_alibi_for_later_ones() -> None:
    suspects, (session, other) = Suspects(), _crowd(2)
    session.emitted = 5
    for _ in range(3):
        _lose(suspects, [session])
    assert _may_run(suspects, [session, other]) == [session]


def test_a_token_wipes_out_an_earlier_lone_death() -> None:
    suspects, (session,) = Suspects(), _crowd(1)
    for _ in range(2):
        _lose(suspects, [session])
    _emit(suspects, session)
    assert [_lose(suspects, [session]) for _ in range(4)] == [[], [], [], [session]], "the count begins anew"


def test_losses_of_others_leave_a_bystander_alone() -> None:
    suspects, crowd = Suspects(), _crowd(3)
    for _ in range(5):
        _lose(suspects, crowd[:2])
    assert crowd[2].strikes == 0


def test_a_session_that_ended_before_the_loss_is_not_counted() -> None:
    suspects, (gone, other) = Suspects(), _crowd(2)
    gone.move(State.DONE)
    for _ in range(3):
        poisoned = _lose(suspects, [gone, other])
    assert poisoned == [other], "it was alone, as far as the living are concerned"


# ---- trials


def test_a_lone_session_is_poison_with_its_third_loss() -> None:
    suspects, (session,) = Suspects(), _crowd(1)
    assert [_lose(suspects, [session]) for _ in range(3)] == [[], [], [session]]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 16, 31])
def test_a_culprit_is_found_in_as_many_losses_as_halving_takes(count: int) -> None:
    for culprit in range(count):
        suspects, crowd = Suspects(), _crowd(count)
        halvings = (count - 1).bit_length()
        losses = _search(suspects, crowd, lambda session, at=culprit: session.slot == at)
        assert losses <= 2 + halvings + 2
        innocent = [session for session in crowd if session.slot != culprit]
        assert all(session.live for session in innocent)
        assert bool(_may_run(suspects, innocent)) == bool(innocent)


def test_two_culprits_are_both_found_and_nobody_else() -> None:
    suspects, crowd = Suspects(), _crowd(8)
    for _ in range(2):
        _search(suspects, crowd, lambda session: session.slot in (2, 5))
    assert [session.slot for session in crowd if not session.live] == [2, 5]


def test_a_cleared_half_sends_the_other_half_of_its_group_to_trial() -> None:
    suspects, crowd = Suspects(), _crowd(8)
    for _ in range(2):
        _lose(suspects, crowd)
    _lose(suspects, crowd[:4])
    assert _may_run(suspects, crowd) == crowd[:2]
    for session in crowd[:2]:
        _emit(suspects, session)
    assert _may_run(suspects, crowd) == crowd[2:3], "one of the two left of the group that died, not of all"


def test_once_everybody_is_cleared_all_run_again() -> None:
    suspects, crowd = Suspects(), _crowd(5)
    for _ in range(2):
        _lose(suspects, crowd)
    for _ in range(10):
        for session in _may_run(suspects, crowd):
            _emit(suspects, session)
    assert _may_run(suspects, crowd) == crowd
    assert not any(suspects.tries(session) for session in crowd)


def test_a_suspect_that_is_cancelled_does_not_hold_up_the_others() -> None:
    suspects, crowd = Suspects(), _crowd(2)
    for _ in range(2):
        _lose(suspects, crowd)
    assert _may_run(suspects, crowd) == crowd[:1]
    crowd[0].move(State.DONE)
    suspects.clear(crowd[0])
    suspects.check()
    assert _may_run(suspects, crowd) == crowd[1:]


# ---- slots


def test_a_trial_takes_those_with_a_slot_first_because_others_could_not_begin() -> None:
    suspects = Suspects()
    slotless, seated = _session(0, slot=False), _session(1)
    for _ in range(2):
        _lose(suspects, [slotless, seated])
    assert suspects.tries(seated)
    assert not suspects.tries(slotless)


def test_everyone_may_run_while_nobody_on_trial_has_a_slot() -> None:
    suspects = Suspects()
    slotless, stranger = _session(0, slot=False), _session(1)
    for _ in range(2):
        _lose(suspects, [slotless])
    assert suspects.tries(slotless)
    assert suspects.may_run(stranger)
    slotless.slot = 3
    assert not suspects.may_run(stranger)


def test_a_suspect_whose_last_row_is_in_flight_is_still_on_trial_without_its_slot() -> None:
    suspects = Suspects()
    leaving, stranger = _session(0), _session(1)
    for _ in range(2):
        _lose(suspects, [leaving])
    leaving.slot, leaving.tokens_planned = None, leaving.job.max_new_tokens
    assert not suspects.may_run(stranger)


def test_a_trial_waits_for_rows_of_others_in_flight() -> None:
    suspects, (suspect, stranger) = Suspects(), _crowd(2)
    assert not suspects.crowded([stranger])
    for _ in range(2):
        _lose(suspects, [suspect])
    assert suspects.crowded([stranger])
    assert not suspects.crowded([suspect])
    assert not suspects.crowded([])
