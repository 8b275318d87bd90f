"""Rates over a sliding window of a clock that the test moves."""

from __future__ import annotations

import pytest

from treadle_broker.rates import WINDOW_S, RateMeter


def _steady(per_tick: int, tick_s: float, until: float, start: float = 0.0) -> tuple[RateMeter, float]:
    meter, now = RateMeter(), start
    while now < start + until:
        meter.add(per_tick, now)
        now += tick_s
    return meter, now


def test_nothing_is_no_rate() -> None:
    assert RateMeter().rate(5.0) == 0.0


@pytest.mark.parametrize("until", [2.0, 9.7, 10.0, 10.3, 25.0, 61.9])
@pytest.mark.parametrize("start", [0.0, 1000.25])
def test_a_steady_stream_shows_its_rate_at_any_moment(until: float, start: float) -> None:
    meter, now = _steady(per_tick=8, tick_s=0.02, until=until, start=start)
    assert meter.rate(now) == pytest.approx(400, rel=0.02)


def test_a_young_stream_is_measured_over_its_own_life() -> None:
    meter, now = _steady(per_tick=1, tick_s=0.1, until=1.0)
    assert meter.rate(now) == pytest.approx(10, rel=0.11)


def test_a_single_burst_is_not_blown_up_by_a_tiny_span() -> None:
    meter = RateMeter()
    meter.add(100, 3.0)
    assert meter.rate(3.0) == 200.0


def test_the_window_forgets() -> None:
    meter, now = _steady(per_tick=8, tick_s=0.02, until=20.0)
    assert meter.rate(now + WINDOW_S / 2) == pytest.approx(200, rel=0.1)
    assert meter.rate(now + WINDOW_S + 1.0) == 0.0


def test_a_stream_that_starts_again_after_a_pause_counts_the_pause() -> None:
    meter = RateMeter()
    meter.add(1, 0.0)
    meter.add(100, 100.0)
    assert meter.rate(100.0) == pytest.approx(100 / WINDOW_S, rel=0.06)


def test_zero_events_do_not_start_the_clock() -> None:
    meter = RateMeter()
    meter.add(0, 0.0)
    meter.add(10, 100.0)
    assert meter.rate(101.0) == 10.0


def test_the_same_events_give_the_same_rate_and_looking_changes_nothing() -> None:
    meter, now = _steady(per_tick=3, tick_s=0.07, until=12.0)
    other, _ = _steady(per_tick=3, tick_s=0.07, until=12.0)
    for look in (now, now + 0.1, now + 3.0):
        meter.rate(look)
    assert [meter.rate(now + 4.0), meter.rate(now + 4.0)] == [other.rate(now + 4.0)] * 2


def test_memory_does_not_grow_with_the_stream() -> None:
    meter, _ = _steady(per_tick=1, tick_s=0.01, until=120.0)
    assert len(meter._buckets) <= 21
