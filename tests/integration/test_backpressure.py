"""A burst beyond slots and queue: exactly what fits is accepted, the rest is told when to come back."""

from __future__ import annotations

import threading
import time

import pytest
from real_node import RealNode, wait_for

from treadle import ContextTooLong, DuplicateSession, Overloaded

SLOTS, QUEUE, JOBS = 2, 4, 40


@pytest.fixture
def small_node(make_node) -> RealNode:
    return make_node(engine="reference", max_sessions=SLOTS, queue_depth=QUEUE, session_tokens=512).start().wait_ready()


def test_a_burst_is_accepted_up_to_slots_and_queue_and_those_that_wait_get_in(small_node: RealNode) -> None:
    refusals: list[Overloaded] = []
    got_in: list[bool] = []
    with small_node.client() as client:
        sessions = []
        for number in range(JOBS):
            try:
                sessions.append(client.generate(f"job {number}", max_tokens=400, ignore_eos=True))
            except Overloaded as refusal:
                refusals.append(refusal)
        assert len(sessions) == SLOTS + QUEUE
        assert len(refusals) == JOBS - SLOTS - QUEUE
        for refusal in refusals:
            assert (refusal.budget, refusal.needed, refusal.limit) == ("queue_depth", 1, QUEUE)
            assert refusal.available == 0
            assert refusal.retry_after_s is not None
            assert refusal.retry_after_s > 0

        def come_back(refusal: Overloaded) -> None:
            time.sleep(refusal.retry_after_s or 0)
            try:
                client.generate("again", max_tokens=400, ignore_eos=True).result()
                got_in.append(True)
            except Overloaded:
                got_in.append(False)

        threads = [threading.Thread(target=come_back, args=(refusal,)) for refusal in refusals]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [len(session.tokens) for session in sessions if session.result() is not None] == [400] * len(sessions)
    assert sum(got_in) >= 0.8 * len(refusals)
    seen = small_node.wait_idle()
    assert seen["rejected_by_reason"]["REJECTED_QUEUE_FULL"] == len(refusals) + got_in.count(False)


def test_a_group_is_taken_whole_or_not_at_all(small_node: RealNode) -> None:
    with small_node.client() as client:
        with pytest.raises(Overloaded) as refused:
            client.submit_many([{"prompt": f"{number}", "max_tokens": 300, "ignore_eos": True} for number in range(7)])
        assert len(refused.value.decisions) == 7
        assert not any(decision.accepted for decision in refused.value.decisions)
        sessions = client.submit_many([{"prompt": f"{number}", "max_tokens": 20} for number in range(6)])
        assert len({session.session_id for session in sessions}) == 6
        for session in sessions:
            session.wait()
        with pytest.raises(ContextTooLong):
            client.submit_many([{"prompt": "fits", "max_tokens": 5}, {"prompt": "x" * 600, "max_tokens": 5}])


def test_an_id_is_refused_while_it_runs_and_free_the_moment_it_ends(small_node: RealNode) -> None:
    with small_node.client() as client:
        first = client.generate("a", max_tokens=400, ignore_eos=True, session_id="mine")
        with pytest.raises(DuplicateSession):
            client.generate("a", max_tokens=4, session_id="mine")
        assert first.cancel()
        second = client.generate("a", max_tokens=4, session_id="mine", ignore_eos=True)
        assert second.epoch == first.epoch + 1
        second.result()


def test_a_full_node_refuses_quickly_and_serves_again_afterwards(small_node: RealNode) -> None:
    with small_node.client() as client:
        sessions = [client.generate("x", max_tokens=400, ignore_eos=True) for _ in range(SLOTS + QUEUE)]
        with pytest.raises(Overloaded):
            client.generate("x", max_tokens=4)
        for session in sessions:
            session.cancel()
        wait_for(lambda: client.telemetry()["active_sessions"] == 0, "the cancelled sessions are gone")
        assert len(client.generate("x", max_tokens=4, ignore_eos=True).result().encode()) >= 0
