"""The concurrency sweep beyond its table: what it refuses, and what it can be told by."""

from __future__ import annotations

import json
from typing import Any

import pytest

from treadle_broker import run_concurrency_sweep
from treadle_shared import load_config
from treadle_shared.errors import ConfigError
from treadle_worker.reference import KvBatchEngine, build_reference_engine


def _engine(sessions: int = 8, tokens: int = 64, seed: int = 0) -> KvBatchEngine:
    flags = {"engine": "reference", "max_sessions": sessions, "session_tokens": tokens, "reference_seed": seed}
    flags["cache_slots"] = 0
    return build_reference_engine(load_config(environ={}, flags=flags))


class Closing:
    """An engine that counts how many of its kind are open."""

    open = 0

    def __init__(self, engine: KvBatchEngine) -> None:
        self._engine = engine
        Closing.open += 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def close(self) -> None:
        Closing.open -= 1


def _ticking() -> Any:
    """A clock of one second a look."""
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 1.0
        return now

    return clock


def test_lockstep_and_two_ticks_in_flight_give_the_same_figures_and_tokens() -> None:
    one, two = (run_concurrency_sweep(_engine, depth=depth, jobs=5, new_tokens=6) for depth in (1, 2))
    assert one.baseline == two.baseline
    for left, right in zip(one.levels, two.levels, strict=True):
        assert left.outputs == right.outputs
        assert (left.ticks, left.avg_occupancy, left.max_occupancy, left.peak_kv_bytes) == (
            right.ticks,
            right.avg_occupancy,
            right.max_occupancy,
            right.peak_kv_bytes,
        )


def test_levels_come_sorted_and_once() -> None:
    sweep = run_concurrency_sweep(_engine, levels=(4, 1, 4, 2), jobs=2, new_tokens=2)
    assert [level.concurrency for level in sweep.levels] == [1, 2, 4]


def test_without_a_level_of_one_the_jobs_still_run_alone_for_comparison() -> None:
    sweep = run_concurrency_sweep(_engine, levels=(2, 4), jobs=3)
    assert [level.concurrency for level in sweep.levels] == [2, 4]
    assert sweep.baseline == run_concurrency_sweep(_engine, levels=(1,), jobs=3).baseline
    assert sweep.corruption_free


def test_every_job_is_different_and_answered_whole() -> None:
    sweep = run_concurrency_sweep(_engine, levels=(8,), jobs=8, new_tokens=8)
    assert [len(tokens) for tokens in sweep.baseline.values()] == [8] * 8
    assert len({tuple(tokens) for tokens in sweep.baseline.values()}) == 8


@pytest.mark.parametrize(
    ("jobs", "levels", "saturation"), [(1, (1, 2, 4), 1), (2, (1, 2, 4, 8), 2), (3, (1, 2, 4, 8), 4)]
)
def test_more_slots_than_jobs_saturate_early(jobs: int, levels: tuple[int, ...], saturation: int) -> None:
    assert run_concurrency_sweep(_engine, jobs=jobs, levels=levels).saturation_concurrency == saturation


def test_a_load_that_no_level_can_take_is_not_called_free_of_corruption() -> None:
    sweep = run_concurrency_sweep(lambda level: _engine(level, tokens=8), jobs=2, levels=(1, 2))
    assert sweep.rejected_admissions == 4
    assert not sweep.corruption_free
    assert [level.ticks for level in sweep.levels] == [0, 0]


def test_an_engine_of_fewer_sequences_than_its_level_shows_as_early_saturation() -> None:
    sweep = run_concurrency_sweep(lambda level: _engine(min(level, 2)))
    assert sweep.saturation_concurrency == 2
    assert sweep.corruption_free


def test_every_engine_is_closed_again_also_after_a_failure() -> None:
    class Failing(Closing):
        def prefill(self, items: Any) -> Any:
            raise MemoryError

    run_concurrency_sweep(lambda level: Closing(_engine(level)), jobs=1, levels=(2, 4))
    with pytest.raises(MemoryError):
        run_concurrency_sweep(lambda level: Failing(_engine(level)), jobs=1)
    assert Closing.open == 0


def test_throughput_and_latency_are_taken_from_the_clock() -> None:
    sweep = run_concurrency_sweep(_engine, jobs=2, levels=(1,), new_tokens=3, clock=_ticking())
    (level,) = sweep.levels
    assert 0 < level.tokens_per_s < 6
    assert level.ttft_ms.p50 is not None
    assert level.itl_ms.p99 is not None
    assert level.ttft_ms.p50 >= 1000
    assert level.itl_ms.p99 >= 1000
    assert sweep.throughput_plateau == 1
    json.dumps(sweep.to_dict(), allow_nan=False)


@pytest.mark.parametrize(
    ("key", "value"), [("jobs", 0), ("prompt_tokens", 0), ("new_tokens", -1), ("levels", ()), ("levels", (2, 0))]
)
def test_an_absurd_sweep_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        run_concurrency_sweep(_engine, **{key: value})
    assert refused.value.key == key
