"""The fair queue: priority, then clients in turn, then arrival."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from treadle_broker.fair_queue import FairQueue
from treadle_broker.session import Job, Session, SessionKey


def _session(name: str, client: str = "ann", priority: int = 0, prompt: int = 1) -> Session:
    job = Job(client=client, session_id=name, prompt_tokens=prompt, max_new_tokens=1, priority=priority)
    return Session(key=SessionKey(client, name, 0), job=job, submitted_at=0.0)


def _queue(*sessions: Session) -> FairQueue:
    queue = FairQueue()
    for session in sessions:
        queue.push(session)
    return queue


def _serve(queue: FairQueue) -> list[str]:
    served = []
    while (head := queue.head()) is not None:
        queue.remove(head, served=True)
        served.append(head.key.session_id)
    return served


def test_one_clients_sessions_are_served_as_they_came() -> None:
    assert _serve(_queue(_session("1"), _session("2"), _session("3"))) == ["1", "2", "3"]


def test_clients_take_turns_whatever_one_of_them_has_submitted() -> None:
    flood = [_session(f"a{number}") for number in range(100)]
    served = _serve(_queue(*flood, _session("b0", "bob"), _session("c0", "cyd"), _session("b1", "bob")))
    assert served[:6] == ["a0", "b0", "c0", "a1", "b1", "a2"]


def test_a_higher_priority_goes_first_and_clients_take_turns_within_it() -> None:
    queue = _queue(
        _session("low"),
        _session("a0", "ann", 5),
        _session("a1", "ann", 5),
        _session("b0", "bob", 5),
        _session("top", "bob", 9),
    )
    assert _serve(queue) == ["top", "a0", "b0", "a1", "low"]


def test_a_client_that_left_and_came_back_joins_at_the_end_of_the_turn() -> None:
    queue = _queue(_session("a0"), _session("b0", "bob"), _session("b1", "bob"))
    head = queue.head()
    assert head is not None
    queue.remove(head, served=True)
    queue.push(_session("a1"))
    assert _serve(queue) == ["b0", "a1", "b1"]


def test_a_session_that_gives_up_does_not_use_up_its_clients_turn() -> None:
    given_up = _session("a0")
    queue = _queue(given_up, _session("a1"), _session("b0", "bob"))
    queue.remove(given_up, served=False)
    assert _serve(queue) == ["a1", "b0"]


def test_giving_up_in_the_middle_leaves_the_order_of_the_others() -> None:
    middle = _session("b0", "bob")
    queue = _queue(_session("a0"), middle, _session("c0", "cyd"), _session("b1", "bob"))
    queue.remove(middle, served=False)
    assert _serve(queue) == ["a0", "b1", "c0"]


def test_it_counts_sessions_and_their_prompt_tokens() -> None:
    first = _session("1", prompt=5)
    queue = _queue(first, _session("2", "bob", 3, prompt=7))
    assert (len(queue), queue.tokens) == (2, 12)
    queue.remove(first, served=False)
    assert (len(queue), queue.tokens) == (1, 7)
    assert bool(queue)
    _serve(queue)
    assert (len(queue), queue.tokens) == (0, 0)
    assert not queue
    assert queue.head() is None


def _is_fair(served: list[Session]) -> bool:
    """While a client waits, no other is served twice in a row at the same priority."""
    last: dict[tuple[int, str], int] = {}
    for place, session in enumerate(served):
        priority, client = session.job.priority, session.key.client
        since = last.get((priority, client))
        if since is not None:
            skipped = {later.key.client for later in served[place:] if later.job.priority == priority} - {client}
            between = {other.key.client for other in served[since + 1 : place] if other.job.priority == priority}
            if not skipped <= between:
                return False
        last[priority, client] = place
    return True


sessions = st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from([0, 0, 0, 7])), max_size=30)


@given(sessions, st.data())
def test_the_order_it_tells_is_the_order_it_serves(wanted: list[tuple[str, int]], data: st.DataObject) -> None:
    queue = FairQueue()
    waiting: list[Session] = []
    for number, (client, priority) in enumerate(wanted):
        session = _session(f"s{number}", client, priority)
        queue.push(session)
        waiting.append(session)
        told = [one.key.session_id for one in queue.in_order()]
        assert queue.ahead(session) == told.index(session.key.session_id)
        if data.draw(st.integers(0, 3)) == 0:
            gone = data.draw(st.sampled_from(waiting))
            queue.remove(gone, served=False)
            waiting.remove(gone)
        elif data.draw(st.integers(0, 3)) == 0:
            head = queue.head()
            assert head is not None
            queue.remove(head, served=True)
            waiting.remove(head)
    assert len(queue) == len(waiting)
    told = list(queue.in_order())
    assert {session.key for session in told} == {session.key for session in waiting}
    assert _is_fair(told)
    assert _serve(queue) == [session.key.session_id for session in told]
