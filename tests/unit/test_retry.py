"""What a refused client is told, and that it gets in when it comes back then."""

from __future__ import annotations

import heapq
from itertools import count

import pytest
from hand_worker import answer, facts, job, node

from treadle_broker import Scheduler
from treadle_broker.retry import (
    _DEFAULT_TICK_S,
    _FLOOR_S,
    _MARGIN,
    _MAX_PROMISES,
    _MAX_PROMISES_A_CLIENT,
    RetryEstimator,
)
from treadle_shared.admission import AdmissionReason


def _estimator(tick_s: float = 0.1) -> RetryEstimator:
    estimator = RetryEstimator()
    estimator.observe(tick_s)
    return estimator


# ---- the length of a tick


def test_a_warm_up_counts_until_a_tick_was_measured() -> None:
    estimator = RetryEstimator()
    assert estimator.tick_s == _DEFAULT_TICK_S
    estimator.seed(0.2)
    assert estimator.tick_s == 0.2
    estimator.observe(0.5)
    estimator.seed(0.2)
    assert estimator.tick_s > 0.2


def test_a_warm_up_that_measured_nothing_is_ignored() -> None:
    estimator = RetryEstimator()
    estimator.seed(0.0)
    assert estimator.tick_s == _DEFAULT_TICK_S


def test_the_mean_follows_the_ticks() -> None:
    estimator = _estimator(1.0)
    for _ in range(100):
        estimator.observe(0.2)
    assert estimator.tick_s == pytest.approx(0.2, rel=0.01)


# ---- places in time


def test_each_refused_client_gets_the_next_place_that_opens() -> None:
    estimator = _estimator(0.1)
    waits = [estimator.promise("ann", [10, 30], mean_job=50, now=0.0) for _ in range(5)]
    ticks = [10, 30, 60, 80, 110]  # the two running ones, then one typical job more in each slot, and so on
    assert waits == pytest.approx([ticks_left * 0.1 * _MARGIN for ticks_left in ticks])


def test_a_later_client_is_never_told_an_earlier_time() -> None:
    estimator = _estimator()
    first = estimator.promise("ann", [100], mean_job=10, now=0.0)
    assert estimator.promise("ann", [1], mean_job=1, now=0.0) >= first


def test_a_promise_is_over_when_its_time_has_come() -> None:
    estimator = _estimator(0.1)
    first = estimator.promise("ann", [10], mean_job=10, now=0.0)
    assert estimator.promise("ann", [10], mean_job=10, now=first) == pytest.approx(first)


def test_nobody_is_told_to_poll() -> None:
    assert _estimator(1e-6).promise("ann", [1], mean_job=1, now=0.0) == _FLOOR_S
    assert _estimator(0.1).promise("ann", [], mean_job=0, now=0.0) >= _FLOOR_S


def test_the_promises_kept_are_bounded() -> None:
    estimator = _estimator()
    for number in range(_MAX_PROMISES + 10):
        last = estimator.promise(f"c{number}", [1, 2], mean_job=3, now=0.0)
    assert len(estimator._promises) == len(estimator._held) == _MAX_PROMISES
    assert estimator.promise("one more", [1, 2], mean_job=3, now=0.0) == pytest.approx(last, rel=0.01)
    estimator.promise("later", [1], mean_job=3, now=1e9)
    assert len(estimator._promises) == len(estimator._held) == 1


def test_who_polls_moves_nobodys_turn_but_its_own() -> None:
    estimator = _estimator(0.1)
    polled = [estimator.promise("poller", [10], mean_job=10, now=0.0) for _ in range(1000)]
    assert len(set(polled)) == _MAX_PROMISES_A_CLIENT
    assert polled[-1] == max(polled)
    honest = estimator.promise("honest", [10], mean_job=10, now=0.0)
    assert honest == pytest.approx((_MAX_PROMISES_A_CLIENT + 1) * 10 * 0.1 * _MARGIN)


def test_a_place_that_somebody_took_is_promised_no_longer() -> None:
    estimator, other = _estimator(0.1), _estimator(0.1)
    estimator.promise("ann", [10], mean_job=10, now=0.0)
    second = estimator.promise("bob", [10], mean_job=10, now=0.0)
    estimator.taken()
    third = estimator.promise("cyd", [10], mean_job=10, now=0.0)
    assert third == second, "one place was taken: the next is the second again"
    estimator.taken()
    estimator.emptied()
    other.taken()
    assert estimator.promise("ann", [10], 10, now=0.0) == other.promise("ann", [10], 10, now=0.0)


def test_another_estimator_goes_on_from_its_mean() -> None:
    first, second = _estimator(0.1), RetryEstimator()
    second.remember(first.measured_tick_s)
    assert second.tick_s == first.tick_s


# ---- a node under a burst


class _Burst:
    """Long jobs that all come at once to two slots and a queue of four, on a clock that ticks move.

    A refused client comes back exactly when it was told to, once; ``second_try`` says who got in then.
    """

    def __init__(self, lengths: list[int], measured_s: float, tick_s: float, depth: int) -> None:
        engine = facts(decode_tick_s=measured_s)
        self.node: Scheduler = node(depth=depth, engine=engine, max_active=2, queue_depth=4)
        self.accepted = 0
        self.second_try: list[bool] = []
        self._tick_s = tick_s
        self._order = count()
        self._back: list[tuple[float, int, int]] = []
        for length in lengths:
            decision = self.node.submit([job(f"j{next(self._order)}", prompt=30, new=length)], 0.0)[0]
            self.accepted += decision.accepted
            if not decision.accepted:
                assert decision.reason is AdmissionReason.REJECTED_QUEUE_FULL
                assert decision.retry_after_s is not None
                heapq.heappush(self._back, (decision.retry_after_s, next(self._order), length))

    def run(self) -> None:
        """Tick until nobody runs and nobody is still to come back."""
        now, sent = 0.0, []
        while self._back or not self.node.idle:
            while (plan := self.node.plan(now)) is not None:
                sent.append(plan)
            now += self._tick_s
            while self._back and self._back[0][0] <= now:
                at, number, length = heapq.heappop(self._back)
                decision = self.node.submit([job(f"again-{number}", prompt=30, new=length)], at)[0]
                self.second_try.append(decision.accepted)
            if sent:
                self.node.complete(answer(sent.pop(0)), now)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    "lengths", [[200] * 40, [100 + 20 * (number % 10) for number in range(40)]], ids=["alike", "mixed"]
)
@pytest.mark.parametrize("tick_s", [0.005, 0.03, 0.2])
def test_of_40_long_jobs_6_get_in_and_most_others_do_when_they_come_back_as_told(
    lengths: list[int], tick_s: float, depth: int
) -> None:
    burst = _Burst(lengths, measured_s=tick_s, tick_s=tick_s, depth=depth)
    assert burst.accepted == 6
    burst.run()
    assert len(burst.second_try) == 34
    assert sum(burst.second_try) >= 0.8 * 34


def test_the_wait_is_not_much_longer_than_it_has_to_be() -> None:
    burst = _Burst([200] * 40, measured_s=0.03, tick_s=0.03, depth=1)
    last = max(at for at, _, _ in burst._back)
    shortest = 17 * 200 * 0.03  # 34 jobs over two slots, one after another
    assert last <= 1.6 * shortest
