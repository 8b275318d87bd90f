"""Runs every case and compares it with each job run alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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

Found = Sequence[Run] | None
Work = Callable[[Tally], Found]


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
                "switches": asdict(model.switches),
                "self_test": facts.exact,
                "self_test_detail": engine.exact_detail,
                "lacks": model.obstacles,
            }
            jobs = Jobs(facts.n_vocab, facts.context_tokens, self._quick)
            driver = Driver(engine)
            self._reference(driver, jobs)
            self._batches(driver, jobs)
            self._chunks(driver, jobs)
        self._new_engines(jobs, engine.threads)
        with self._context() as context:
            self._prefixes(prefixes.Rows(context), jobs)
        return Report(cases=self._results, **about)

    # ---- the cases

    def _reference(self, driver: Driver, jobs: Jobs) -> None:
        """Every job alone: what all else is compared with; the short ones once more."""
        for job in jobs.all:
            [run] = cases.alone(driver, [job])
            self._outputs[job] = run.steps
        self._case("alone, a second time", lambda tally: cases.alone(driver, jobs.short(8), slot=SLOTS - 1))

    def _batches(self, driver: Driver, jobs: Jobs) -> None:
        for count in BATCHES:
            picked = jobs.greedy if count == len(jobs.greedy) else jobs.short(count)
            self._case(f"batch of {count}", lambda tally, jobs=picked: cases.together(driver, jobs, range(len(jobs))))
        some = jobs.short(9)
        self._case("9 slots with gaps, out of order", lambda tally: cases.scattered(driver, some, SLOTS))
        several = jobs.short(8, longest=513)
        self._case("prefills of several lengths in one call", lambda tally: cases.one_call(driver, several))
        self._case(
            "decode between prefill chunks, slots taken again",
            lambda tally: cases.staggered(driver, jobs.short(14, longest=513), _STAGGERED_SLOTS, _NODE_CHUNK),
        )
        self._case(
            "decode between prefill chunks of 7",
            lambda tally: cases.staggered(driver, jobs.short(6, longest=65), _STAGGERED_SLOTS, 7),
        )

    def _chunks(self, driver: Driver, jobs: Jobs) -> None:
        for chunk in CHUNKS:
            longer = jobs.longer_than(chunk, 3)
            if longer:
                self._case(
                    f"prefill chunks of {chunk}",
                    lambda tally, longer=longer, chunk=chunk: cases.alone(driver, longer, chunk),
                )
        longest = jobs.greedy[-1:]
        self._case(
            f"the longest prompt in chunks of {_NODE_CHUNK}",
            lambda tally: cases.alone(driver, longest, _NODE_CHUNK),
        )
        self._case(
            "a lone row of a longer prompt is refused",
            lambda tally: cases.lone_rows_refused(driver, jobs.longer_than(32, 3), tally),
        )

    def _new_engines(self, jobs: Jobs, threads: int) -> None:
        several, whole = jobs.short(_FEW_SLOTS, longest=347), jobs.longer_than(_SMALL_UBATCH, 5)
        with self._engine(max_sessions=_FEW_SLOTS) as engine:
            driver = Driver(engine)
            self._case("a new engine recovers in mid-stream", lambda t: cases.recovered(driver, several, self._outputs))
        with self._engine(max_sessions=_FEW_SLOTS, ubatch_tokens=_SMALL_UBATCH) as engine:
            driver = Driver(engine)
            self._case(f"micro-batches of {_SMALL_UBATCH}", lambda t: cases.alone(driver, whole))
            self._case(f"micro-batches of {_SMALL_UBATCH}, one call", lambda t: cases.one_call(driver, several))
        for other in _THREADS:
            if other != threads:
                with self._engine(max_sessions=_FEW_SLOTS, threads=other) as engine:
                    driver, slots = Driver(engine), range(_FEW_SLOTS)
                    self._case(f"{other} threads, not {threads}", lambda t: cases.together(driver, several, slots))

    def _prefixes(self, rows: prefixes.Rows, jobs: Jobs) -> None:
        picked = [jobs.greedy[-1], jobs.greedy[0], *jobs.sampled[-1:]]
        for name, work in (("prefix copied from a running sequence", prefixes.copied), ("trimmed", prefixes.trimmed)):
            self._case(name, lambda tally, work=work: _each(work, rows, picked, self._outputs, tally))
        self._case("state out and in", lambda t: prefixes.parked(rows, picked[1], picked[2], self._outputs, t))
        self._case(
            "state out and in, the longest prompt",
            lambda t: prefixes.parked(rows, picked[0], picked[1], self._outputs, t),
        )

    # ---- running one

    def _case(self, name: str, work: Callable[..., Found]) -> None:
        started, tally, skipped = time.perf_counter(), Tally(), ""
        try:
            for run in work(tally) or ():
                tally.compare(
                    f"{run.job.name} in slot {run.slot}", self._outputs[run.job][run.first :], run.steps, run.first
                )
        except DecodeFailed as error:
            if error.code == CANNOT_TRIM:
                skipped = str(error)
            else:
                tally.record(f"failed: {error}")
        result = CaseResult(
            name=name,
            prompts=tally.prompts,
            outputs=tally.outputs,
            equal=tally.equal,
            seconds=time.perf_counter() - started,
            first=tally.first,
            skipped=skipped,
        )
        self._results.append(result)
        self._on_case(result)

    @contextmanager
    def _engine(self, **settings: Any) -> Iterator[LlamaEngine]:
        engine = LlamaEngine(msgspec.structs.replace(self._config, **settings), choose=self._choose)
        try:
            yield engine
        finally:
            engine.close()

    @contextmanager
    def _context(self) -> Iterator[LlamaContext]:
        config = msgspec.structs.replace(self._config, max_sessions=prefixes.SLOTS)
        model = LlamaModel(load_library(), config, self._choose, lambda fraction: None)
        context = LlamaContext(model, config, config.threads or 1)
        try:
            yield context
        finally:
            context.close()
            model.close()


def _each(
    work: Callable[[prefixes.Rows, Job, Mapping[Job, Sequence[Step]], Tally], None],
    rows: prefixes.Rows,
    jobs: Sequence[Job],
    outputs: Mapping[Job, Sequence[Step]],
    tally: Tally,
) -> None:
    for job in jobs:
        work(rows, job, outputs, tally)
