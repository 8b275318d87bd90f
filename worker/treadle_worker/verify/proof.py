"""Runs every case and compares it with each job run alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Final

import msgspec

from treadle_shared.config import NodeConfig
from treadle_shared.errors import DecodeFailed
from treadle_worker.llama.context import CANNOT_TRIM, LlamaContext
from treadle_worker.llama.engine import LlamaEngine
from treadle_worker.llama.library import load_library
from treadle_worker.llama.model import LlamaModel
from treadle_worker.llama.switches import SwitchChoice, choose_switches
from treadle_worker.verify import cases, prefixes
from treadle_worker.verify.driver import Driver, Run
from treadle_worker.verify.jobs import Job, Jobs
from treadle_worker.verify.report import CaseResult, Report
from treadle_worker.verify.steps import Step, Tally

CHUNKS: Final = (512, 256, 128, 64, 32, 7)
BATCHES: Final = (2, 4, 8, 16)
SLOTS: Final = 20  # more than the largest batch, so that there are gaps
_FEW_SLOTS: Final = 8  # of the engines beside the main one
_STAGGERED_SLOTS: Final = 5
_NODE_CHUNK: Final = 128  # a node's default prefill per tick
_SMALL_UBATCH: Final = 64
_THREADS: Final = (1, 2)


class Proof:
    """One model's proof. ``config`` says how it runs (exact numerics); ``on_case`` gets every result at once.

    ``run`` opens one engine after the other, never two at a time. Raises ModelError, WeightBudgetError or
    ConfigError where the model cannot be served at all.
    """

    def __init__(
        self,
        config: NodeConfig,
        quick: bool,
        on_case: Callable[[CaseResult], None],
        choose: SwitchChoice = choose_switches,
    ) -> None:
        self._config = config
        self._quick = quick
        self._on_case = on_case
        self._choose = choose
        self._results: list[CaseResult] = []
        self._outputs: dict[Job, Sequence[Step]] = {}

    def run(self) -> Report:
        """Run every case."""
        with self._engine(max_sessions=SLOTS) as engine:
            facts, model = engine.facts, engine.model
            about: dict[str, Any] = {
                "model": str(model.path),
                "recipe": engine.recipe_fingerprint,
                "build": model.library.build,
                "threads": engine.threads,
                "switches": asdict(model.switches) | {"kv": asdict(model.kv_types)},
                "self_test": facts.exact,
                "self_test_detail": engine.exact_detail,
                "lacks": model.obstacles,
            }
            jobs = Jobs(facts.n_vocab, facts.context_tokens, self._quick)
            driver = Driver(engine)
            self._reference(driver, jobs)
            self._batches(driver, jobs)
            self._chunks(driver, jobs, model.keeps_roles)
        self._new_engines(jobs, about["threads"])
        with self._context(about["threads"]) as context:
            self._prefixes(prefixes.Rows(context), jobs)
        return Report(cases=self._results, **about)

    # ---- the cases

    def _reference(self, driver: Driver, jobs: Jobs) -> None:
        """Every job alone: what all else is compared with; the short ones once more."""
        for job in jobs.all:
            [run] = cases.alone(driver, [job])
            self._outputs[job] = run.steps
        self._compare("alone, a second time", cases.alone, driver, jobs.short(8), None, SLOTS - 1)

    def _batches(self, driver: Driver, jobs: Jobs) -> None:
        for count in BATCHES:
            picked = jobs.greedy if count == len(jobs.greedy) else jobs.short(count)
            self._compare(f"batch of {count}", cases.together, driver, picked, range(count))
        self._compare("9 slots with gaps, out of order", cases.scattered, driver, jobs.short(9), SLOTS)
        self._compare("prompts of several lengths in one call", cases.one_call, driver, jobs.short(8, longest=513))
        churn = jobs.short(8 if self._quick else 14, longest=513)
        self._compare("decode mixed with prefill", cases.staggered, driver, churn, _STAGGERED_SLOTS, _NODE_CHUNK)
        few = jobs.short(6, longest=65)
        self._compare("decode mixed with prefill chunks of 7", cases.staggered, driver, few, _STAGGERED_SLOTS, 7)

    def _chunks(self, driver: Driver, jobs: Jobs, keeps_roles: bool) -> None:
        for chunk in CHUNKS:
            if longer := jobs.longer_than(chunk, 3):
                self._compare(f"prefill chunks of {chunk}", cases.alone, driver, longer, chunk)
        longest = jobs.greedy[-1:]
        self._compare(f"longest prompt in chunks of {_NODE_CHUNK}", cases.alone, driver, longest, _NODE_CHUNK)
        if keeps_roles:
            self._check("a lone row is refused", cases.lone_rows_refused, driver, jobs.longer_than(32, 3))
        else:
            self._compare("lone rows at both ends", cases.lone_rows, driver, jobs.longer_than(32, 3))
            self._compare("prompts token by token", cases.alone, driver, jobs.longer_than(32, 2), 1)

    def _new_engines(self, jobs: Jobs, threads: int) -> None:
        several, whole = jobs.short(_FEW_SLOTS, longest=347), jobs.longer_than(_SMALL_UBATCH, 5)
        with self._engine(max_sessions=_FEW_SLOTS) as engine:
            self._compare("a new engine recovers", cases.recovered, Driver(engine), several, self._outputs)
        with self._engine(max_sessions=_FEW_SLOTS, ubatch_tokens=_SMALL_UBATCH) as engine:
            driver = Driver(engine)
            self._compare(f"micro-batches of {_SMALL_UBATCH}", cases.alone, driver, whole)
            self._compare(f"micro-batches of {_SMALL_UBATCH}, one call", cases.one_call, driver, several)
        for other in _THREADS:
            if other != threads:
                with self._engine(max_sessions=_FEW_SLOTS, threads=other) as engine:
                    self._compare(f"threads: {other}", cases.together, Driver(engine), several, range(len(several)))

    def _prefixes(self, rows: prefixes.Rows, jobs: Jobs) -> None:
        short, long, sampled = jobs.greedy[0], jobs.greedy[-1], jobs.sampled[-1]
        for job in (short, long) if self._quick else (short, sampled, long):
            self._check(f"prefix copied, {job.name}", prefixes.copied, rows, job, self._outputs)
            self._check(f"trimmed, {job.name}", prefixes.trimmed, rows, job, self._outputs)
        for job, other in ((short, sampled), (long, short)):
            self._check(f"state out and in, {job.name}", prefixes.parked, rows, job, other, self._outputs)

    # ---- running one

    def _compare(self, name: str, work: Callable[..., Sequence[Run]], *arguments: Any) -> None:
        """A case whose runs must put out what their jobs do alone."""

        def check(tally: Tally) -> None:
            for run in work(*arguments):
                expected = self._outputs[run.job][run.first :]
                tally.compare(f"{run.job.name} in slot {run.slot}", expected, run.steps, run.first)

        self._check(name, check)

    def _check(self, name: str, work: Callable[..., None], *arguments: Any) -> None:
        """A case that keeps its own tally, which it gets as the last argument."""
        started, tally, skipped = time.perf_counter(), Tally(), ""
        try:
            work(*arguments, tally)
        except DecodeFailed as error:
            if error.code == CANNOT_TRIM:
                skipped = str(error)
            else:
                tally.record(f"failed: {error}")
        seconds = time.perf_counter() - started
        result = CaseResult(name=name, seconds=seconds, skipped=skipped, **tally.counts)
        self._results.append(result)
        self._on_case(result)

    @contextmanager
    def _engine(self, **settings: Any) -> Iterator[LlamaEngine]:
        engine = LlamaEngine(msgspec.structs.replace(self._config, cache_slots=0, **settings), choose=self._choose)
        try:
            yield engine
        finally:
            engine.close()

    @contextmanager
    def _context(self, threads: int) -> Iterator[LlamaContext]:
        config = msgspec.structs.replace(self._config, max_sessions=prefixes.SLOTS, cache_slots=0)
        model = LlamaModel(load_library(), config, self._choose, lambda fraction: None)
        context = LlamaContext(model, config, threads)
        try:
            yield context
        finally:
            context.close()
            model.close()
