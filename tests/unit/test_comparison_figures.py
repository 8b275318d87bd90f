"""What a comparison makes of its runs: traces to figures, figures to ratios, results to order and table."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from comparison.capacity import RATES, STEP, capacities, capacity, next_rate, trial_name
from comparison.case import parse_case
from comparison.errors import BenchmarkError
from comparison.experiment import Experiment
from comparison.figure import TOKENS_PER_S
from comparison.job import Ask, Job
from comparison.loads import closed_loop, conversations, long_among_streams, open_loop, poisson_arrivals
from comparison.measures import is_good, measured
from comparison.names import LIMIT, SPLIT, TREADLE, UNIFIED
from comparison.processes import CpuTimes
from comparison.prompts import Prompts
from comparison.ratios import Range, better, paired_ratios
from comparison.records import Record, Records
from comparison.report import report
from comparison.schedule import RunKey, in_pairs, still_to_do
from comparison.tick_account import account
from comparison.trace import Outcome, Trace


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def trace_of(due: float, *arrivals: tuple[float, int], ended: float = 10.0) -> Trace:
    clock = Clock()
    trace = Trace(due, clock=clock)
    for when, count in arrivals:
        clock.now = when
        trace.came([7] * count)
    clock.now = ended
    trace.end(Outcome.DONE)
    return trace


# ---- traces and what is measured


def test_tokens_that_come_together_took_no_time_of_their_own() -> None:
    trace = trace_of(1.0, (1.5, 2), (1.75, 1))
    assert trace.ttft_s == 0.5
    assert trace.gaps_s == [0.0, 0.25]
    assert trace.generated == 3


def test_a_run_counts_from_the_first_due_time_to_the_last_token() -> None:
    found = measured([trace_of(1.0, (2.0, 1), (2.5, 1)), trace_of(2.0, (3.0, 4))])
    assert found["wall_s"] == 2.0
    assert found["tokens_per_s"] == 3.0
    assert (found["requests"], found["done"], found["failed"]) == (2, 2, 0)
    assert found["itl_ms_max"] == 500.0


@pytest.mark.parametrize(
    ("first", "gap", "good"), [(1.9, 0.2, True), (2.1, 0.2, False), (1.9, 0.3, False)], ids=["good", "late", "slow"]
)
def test_a_request_is_good_within_both_bounds(first: float, gap: float, good: bool) -> None:
    assert is_good(trace_of(0.0, (first, 1), (first + gap, 1))) is good


def test_a_refused_request_is_not_good_and_its_refusal_is_timed() -> None:
    clock = Clock()
    trace = Trace(1.0, clock=clock)
    clock.now = 1.25
    trace.end(Outcome.REFUSED)
    found = measured([trace])
    assert not is_good(trace)
    assert (found["refused"], found["refusal_ms_p99"], found["tokens_per_s"]) == (1, 250.0, 0.0)


def test_cpu_outside_the_model_leaves_out_the_busiest_threads() -> None:
    before = CpuTimes(1.0, {1: 0.5, 2: 0.5})
    after = CpuTimes(9.0, {1: 3.5, 2: 4.0, 3: 0.5})
    spent = after.since(before)
    assert spent.total_s == 8.0
    assert spent.outside_model(2) == 1.5  # the rest includes what ended threads used


def test_a_worker_accounts_for_decode_prefill_sampling_and_the_rest() -> None:
    sent = {"event": "sent", "decode": 3, "prefill": [100, 28]}
    decode = {"event": "ran", "part": 0, "engine_s": 0.5, "sample_s": 0.125, "total_s": 0.75}
    prefill = {"event": "ran", "part": 1, "engine_s": 0.25, "sample_s": 0.0, "total_s": 0.25}
    assert account([sent, decode, prefill]) == {
        "worker_ticks": 1, "worker_decode_rows": 3, "worker_prefill_rows": 128, "worker_decode_s": 0.5,
        "worker_prefill_s": 0.25, "worker_sample_s": 0.125, "worker_rest_s": 0.125,
    }  # fmt: skip


# ---- loads


def tokenize(text: str) -> list[int]:
    return [len(word) for word in text.split()]


def test_prompts_depend_on_the_seed_alone() -> None:
    draws = [[Prompts(tokenize, seed).tokens(50) for _ in range(2)] for seed in (1, 1, 2)]
    assert draws[0] == draws[1]
    assert draws[0] != draws[2]
    assert len(draws[0][0]) == 50


def test_poisson_arrivals_are_seeded_ordered_and_as_many_as_the_rate_says() -> None:
    times = poisson_arrivals(20.0, 50.0, random.Random(5))
    assert times == poisson_arrivals(20.0, 50.0, random.Random(5))
    assert times == sorted(times)
    assert max(times) < 50.0
    assert 850 < len(times) < 1150  # five standard deviations
    assert poisson_arrivals(1e-9, 1.0, random.Random(5)) == [0.0]


class Echo:
    """A system that answers each request at once with its token count, and counts how many it served together."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.running = 0
        self.most = 0

    async def ask(self, job: Job, trace: Trace) -> None:
        self.jobs.append(job)
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0)
        trace.came(list(range(job.new_tokens)))
        trace.end(Outcome.DONE)
        self.running -= 1


def test_a_closed_loop_sends_every_job_and_never_more_at_once_than_it_has_callers() -> None:
    echo = Echo()
    jobs = [Job((number,), 2) for number in range(20)]
    traces = asyncio.run(closed_loop(echo.ask, jobs, 4))
    assert echo.jobs == jobs
    assert echo.most == 4
    assert [trace.outcome for trace in traces] == [Outcome.DONE] * 20


async def _deaf(job: Job, trace: Trace) -> None:
    await asyncio.Event().wait()


def test_an_open_loop_gives_up_what_does_not_end() -> None:
    traces = asyncio.run(open_loop(_deaf, [Job((1,), 1)] * 3, [0.0, 0.0, 0.0], 0.0))
    assert [trace.outcome for trace in traces] == [Outcome.CUT] * 3


def test_an_open_loop_counts_from_when_a_request_was_due() -> None:
    traces = asyncio.run(open_loop(Echo().ask, [Job((1,), 1)] * 2, [0.0, 0.002], 5.0))
    assert traces[1].due - traces[0].due == pytest.approx(0.002)
    assert all(trace.outcome is Outcome.DONE for trace in traces)


def test_streams_stop_when_the_last_long_prompt_has_ended() -> None:
    echo = Echo()
    streams = iter(lambda: Job((1,), 1, "stream"), None)
    longs = [Job((2,), 1, "long")] * 2
    traces = asyncio.run(long_among_streams(echo.ask, streams, longs, 3, 0.001))
    assert sum(trace.group == "long" for trace in traces) == 2
    assert sum(trace.group == "stream" for trace in traces) >= 3


def test_a_turn_says_all_that_was_said_before() -> None:
    echo = Echo()
    traces = asyncio.run(conversations(echo.ask, [[9]], [[[5], [6]]], 2))
    assert [job.prompt for job in echo.jobs] == [(9, 5), (9, 5, 0, 1, 6)]
    assert [trace.group for trace in traces] == ["turn 1", "turn 2"]


# ---- order of the runs, and resuming


async def _nothing(ask: Ask, prompts: Prompts) -> list[Trace]:
    return []


def experiment(load: str, paired: Sequence[str], single: Sequence[str] = ()) -> Experiment:
    return Experiment(load=load, paired=paired, single=single, sessions=1, session_tokens=8, drive=_nothing)


def test_pairs_alternate_and_single_systems_run_once() -> None:
    runs = list(in_pairs([experiment("x", ("a", "b"), ("c",)), experiment("y", ("a", "b"))], 2))
    assert [(run.experiment.load, run.system, run.pair) for run in runs] == [
        ("x", "a", 0), ("x", "b", 0), ("x", "c", 0), ("y", "a", 0), ("y", "b", 0),
        ("x", "b", 1), ("x", "a", 1), ("y", "b", 1), ("y", "a", 1),
    ]  # fmt: skip


def test_what_is_recorded_is_not_done_again(tmp_path: Path) -> None:
    file, facts = tmp_path / "deep" / "closed.jsonl", {"case": "q4_1-exact"}
    runs = list(in_pairs([experiment("x", ("a", "b"))], 2))
    Records(file, facts).add(Record(runs[0].key, {"tokens_per_s": 1.5}))
    again = Records(file, facts)
    assert again.of("x", "a") == [Record(RunKey("x", "a", 0), {"tokens_per_s": 1.5})]
    assert [run.key for run in still_to_do(runs, again.finished)] == [run.key for run in runs[1:]]


def test_a_line_cut_off_by_a_crash_is_done_again(tmp_path: Path) -> None:
    file = tmp_path / "closed.jsonl"
    Records(file, {}).add(Record(RunKey("x", "a", 0), {"tokens_per_s": 1.5}))
    with file.open("a") as output:
        output.write('{"load": "x", "sys')
    assert Records(file, {}).finished == {RunKey("x", "a", 0)}
    Records(file, {}).add(Record(RunKey("x", "b", 0), {}))
    assert Records(file, {}).finished == {RunKey("x", "a", 0), RunKey("x", "b", 0)}


def test_results_of_other_circumstances_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "closed.jsonl"
    Records(file, {"threads": 2})
    with pytest.raises(BenchmarkError, match="move it away"):
        Records(file, {"threads": 4})


@pytest.mark.parametrize("text", ["q4_1", "exact", "q4_1-quick", ""])
def test_a_case_names_quantisation_and_numerics(text: str) -> None:
    assert parse_case("Q4_K_M-fast").name == "q4_k_m-fast"
    with pytest.raises(BenchmarkError):
        parse_case(text)


# ---- the search for a capacity


@pytest.mark.parametrize("true_capacity", [0.1, 0.25, 0.9, 2.0, 100.0])
def test_the_search_ends_at_the_highest_rate_that_is_borne(true_capacity: float) -> None:
    goodput: dict[float, float] = {}
    while (rate := next_rate(goodput)) is not None:
        assert rate not in goodput
        goodput[rate] = 1.0 if rate <= true_capacity else 0.5
    found = capacity(goodput)
    assert len(goodput) <= 6
    assert found <= true_capacity
    assert found * STEP > min(true_capacity, RATES[-1]) * 0.999 or found == 0.0


def test_a_search_goes_on_from_its_records() -> None:
    steps = [Record(RunKey(trial_name(RATES[16]), TREADLE, 0), {"goodput": 0.5})]
    assert capacities(steps) == {}
    steps += [Record(RunKey(trial_name(rate), TREADLE, 0), {"goodput": 1.0}) for rate in RATES[:16]]
    assert capacities(steps) == {TREADLE: RATES[15]}


# ---- ratios and the table


def records_of(system: str, *speeds: float) -> list[Record]:
    return [Record(RunKey("closed 8", system, pair), {"tokens_per_s": speed}) for pair, speed in enumerate(speeds)]


def test_ratios_are_taken_pair_by_pair() -> None:
    mine, theirs = records_of(TREADLE, 100.0, 60.0, 90.0), records_of(SPLIT, 100.0, 50.0, 100.0, 1.0)
    assert paired_ratios(mine, theirs, "tokens_per_s") == Range(1.0, 0.9, 1.2)
    assert paired_ratios(mine, [], "tokens_per_s") is None


def test_the_better_configuration_is_the_one_with_the_better_median() -> None:
    candidates = {SPLIT: records_of(SPLIT, 10.0, 10.0, 99.0), UNIFIED: records_of(UNIFIED, 11.0, 11.0, 11.0)}
    assert better(candidates, "tokens_per_s", higher_is_better=True) == UNIFIED
    assert better(candidates, "tokens_per_s", higher_is_better=False) == SPLIT
    assert better({SPLIT: []}, "tokens_per_s", higher_is_better=True) is None


def test_the_report_tells_medians_ratios_and_what_failed(tmp_path: Path) -> None:
    records = Records(tmp_path / "x.jsonl", {"case": "q4_1-exact"})
    for record in [
        *records_of(TREADLE, 110.0, 120.0), *records_of(SPLIT, 100.0, 100.0), *records_of(UNIFIED, 80.0, 80.0),
        *records_of(LIMIT, 125.0),
        Record(RunKey(trial_name(1.0), TREADLE, 0), {"goodput": 1.0}),
        Record(RunKey("closed 8", SPLIT, 2), {"failed": 3, "failure": "HTTP 500"}),
    ]:  # fmt: skip
        records.add(record)
    text = report(records, [TOKENS_PER_S], "closed")
    assert "| closed 8 | treadle [2] | 115.0 (110.0..120.0) |" in text
    assert "| closed 8 | treadle | generated tok/s | **llama-server split** | 1.15 (1.10..1.20) | 2 |" in text
    assert "| closed 8 | treadle | generated tok/s | llama-batched-bench | 0.88 | 1 |" in text
    assert "HTTP 500" in text
    assert "capacity 1" not in text
