"""The proof's cases on an engine that is exact, and on engines that each leak something into the logits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest

from treadle_shared.engine import DecodeItem, EngineFacts, PrefillItem, StepResult
from treadle_shared.errors import DecodeFailed
from treadle_worker.verify import cases
from treadle_worker.verify.driver import Driver, Run
from treadle_worker.verify.jobs import Job, Jobs
from treadle_worker.verify.steps import Step, Tally

N_VOCAB = 16
SLOTS = 20
Leak = Callable[[str, int, int], int]  # of (role, rows in the call, slot), a number that the logits then depend on


def nothing(_role: str, _rows: int, _slot: int) -> int:
    return 0


def batch_size(role: str, rows: int, _slot: int) -> int:
    return rows if role == "decode" else 0


def slot_number(_role: str, _rows: int, slot: int) -> int:
    return slot


def chunk_size(role: str, rows: int, _slot: int) -> int:
    return rows if role == "prefill" else 0


def lone_row(role: str, rows: int, _slot: int) -> int:
    return int(role == "prefill" and rows == 1)


class LeakyEngine:
    """Logits are a hash of a sequence's own tokens, and of what ``leak`` lets in; the choice is an arg max."""

    def __init__(self, leak: Leak, keeps_roles: bool = True) -> None:
        self.on_logits: Any = None
        self._leak = leak
        self._refuses = keeps_roles
        self.facts = EngineFacts(
            recipe_fingerprint="leaky",
            n_vocab=N_VOCAB,
            context_tokens=1 << 20,
            max_sequences=SLOTS,
            kv_bytes_per_token=1,
            weight_bytes=0,
            min_prefill_rows=2 if keeps_roles else 1,
            replay_decode=keeps_roles,
        )
        self._tokens: dict[tuple[int | str, int], list[int]] = {}
        self._last: dict[int | str, int] = {}

    def prefill(self, items: Sequence[PrefillItem]) -> list[StepResult]:
        results = []
        for item in items:
            if self._refuses and item.start and len(item.tokens) == 1:
                raise DecodeFailed(-1, "a lone row")
            history = self._tokens.setdefault((item.session, item.epoch), [])
            assert len(history) == item.start
            history.extend(item.tokens)
            results.append(self._step(item.session, item.epoch, item.sample, "prefill", len(item.tokens)))
        return results

    def decode_batch(self, items: Sequence[DecodeItem]) -> list[StepResult]:
        results = []
        for item in items:
            history = self._tokens[item.session, item.epoch]
            assert len(history) == item.pos
            history.append(self._last[item.session] if item.token is None else item.token)
            results.append(self._step(item.session, item.epoch, item.sample, "decode", len(items)))
        return results

    def release(self, session: int | str, epoch: int) -> None:
        del self._tokens[session, epoch]

    @property
    def idle(self) -> bool:
        return not self._tokens

    def _step(self, session: int | str, epoch: int, sample: bool, role: str, rows: int) -> StepResult:
        if not sample:
            return StepResult(session, epoch)
        seed = [*self._tokens[session, epoch], 1 + self._leak(role, rows, int(session))]
        row = np.random.default_rng(seed).standard_normal((1, N_VOCAB)).astype(np.float32)
        self.on_logits([session], row)
        self._last[session] = int(row[0].argmax())
        return StepResult(session, epoch, self._last[session])


class Bench:
    """Jobs, what they put out alone, and a driver over one engine."""

    def __init__(self, leak: Leak, keeps_roles: bool = True) -> None:
        self.engine = LeakyEngine(leak, keeps_roles)
        self.driver = Driver(self.engine)  # type: ignore[arg-type]
        self.jobs = Jobs(N_VOCAB, 1 << 20, quick=True)
        self.outputs: dict[Job, Sequence[Step]] = {}
        for job in self.jobs.all:
            [run] = cases.alone(self.driver, [job])
            self.outputs[job] = run.steps

    def tally(self, runs: Iterable[Run]) -> Tally:
        tally = Tally()
        for run in runs:
            tally.compare(run.job.name, self.outputs[run.job][run.first :], run.steps, run.first)
        return tally


CASES: dict[str, Callable[[Bench], list[Run]]] = {
    "alone": lambda bench: cases.alone(bench.driver, bench.jobs.all, slot=7),
    "chunks": lambda bench: cases.alone(bench.driver, bench.jobs.longer_than(7, 3), 7),
    "together": lambda bench: cases.together(bench.driver, bench.jobs.short(8), range(8)),
    "scattered": lambda bench: cases.scattered(bench.driver, bench.jobs.short(9), SLOTS),
    "one call": lambda bench: cases.one_call(bench.driver, bench.jobs.short(6)),
    "staggered": lambda bench: cases.staggered(bench.driver, bench.jobs.short(12), 3, 32),
    "recovered": lambda bench: cases.recovered(bench.driver, bench.jobs.short(6), bench.outputs),
}
FREE_CASES = CASES | {
    "lone rows": lambda bench: cases.lone_rows(bench.driver, bench.jobs.longer_than(32, 3)),
    "token by token": lambda bench: cases.alone(bench.driver, bench.jobs.longer_than(32, 2), 1),
}
"""Where prompt tokens may run alone, too."""
FOUND = {
    batch_size: {"together", "scattered", "one call", "staggered", "recovered"},
    slot_number: {"alone", "together", "scattered", "one call", "staggered", "recovered"},
    chunk_size: {"chunks", "staggered"},
}


@pytest.mark.parametrize("name", CASES)
def test_an_exact_engine_passes_every_case_and_is_left_empty(name: str) -> None:
    bench = Bench(nothing)
    tally = bench.tally(CASES[name](bench))
    assert tally.outputs > tally.prompts > 0
    assert (tally.equal, tally.first) == (tally.outputs, "")
    assert bench.engine.idle


@pytest.mark.parametrize("name", FREE_CASES)
def test_an_exact_engine_without_roles_passes_every_case(name: str) -> None:
    bench = Bench(nothing, keeps_roles=False)
    tally = bench.tally(FREE_CASES[name](bench))
    assert (tally.equal, tally.first) == (tally.outputs, "")
    assert bench.engine.idle


def test_a_lone_row_that_is_another_is_found_by_the_cases_that_run_one() -> None:
    bench = Bench(lone_row, keeps_roles=False)
    found = {name for name, case in FREE_CASES.items() if bench.tally(case(bench)).first}
    assert {"lone rows", "token by token"} <= found


@pytest.mark.parametrize(("leak", "names"), FOUND.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_what_leaks_is_found_by_the_cases_that_vary_it(leak: Leak, names: set[str]) -> None:
    bench = Bench(leak)
    found = {name for name, case in CASES.items() if bench.tally(case(bench)).first}
    assert found == names


def test_staggered_runs_take_slots_again_and_decode_beside_each_other() -> None:
    bench = Bench(nothing)
    runs = cases.staggered(bench.driver, bench.jobs.short(12), 3, 32)
    assert len(runs) == 12
    assert {run.slot for run in runs} <= {0, 1, 2}
    assert all(run.done for run in runs)


def test_recovery_starts_at_the_tokens_after_the_forced_ones() -> None:
    bench = Bench(nothing)
    runs = cases.recovered(bench.driver, bench.jobs.short(6), bench.outputs)
    assert {run.first for run in runs} == {1, 2, 3, 4}
    assert all(run.first + len(run.steps) == run.job.steps + 1 for run in runs)


@pytest.mark.parametrize("refuses", [True, False])
def test_an_engine_that_runs_a_lone_row_is_found(refuses: bool) -> None:
    tally = Tally()
    driver = Driver(LeakyEngine(nothing, refuses))  # type: ignore[arg-type]
    cases.lone_rows_refused(driver, Jobs(N_VOCAB, 1 << 20, quick=True).longer_than(32, 2), tally)
    assert (tally.outputs, tally.equal == 2) == (2, refuses)


def test_a_proof_has_eight_prompts_of_33_to_1200_tokens_and_both_ways_to_choose() -> None:
    jobs = Jobs(49_152, 1 << 20, quick=False)
    lengths = [len(job.prompt) for job in jobs.greedy]
    assert len(lengths) >= 8
    assert (lengths[0], lengths[-1]) == (33, 1200)
    assert lengths == sorted(lengths)
    assert all(not job.params.greedy for job in jobs.sampled)
    assert len({job.params.seed for job in jobs.sampled}) == len(jobs.sampled)


def test_prompts_that_the_context_cannot_hold_are_left_out() -> None:
    assert [len(job.prompt) for job in Jobs(100, 100, quick=False).greedy] == [33, 48, 65]
