"""Carries a suite out for one case, within its time, and goes on where it was stopped."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from comparison.capacity import capacity, next_rate, tried
from comparison.closed_suite import NEW_TOKENS, PROMPT_TOKENS
from comparison.experiment import Experiment
from comparison.figure import TOKENS_PER_S, Figure
from comparison.limit import measure_limit
from comparison.names import LIMIT
from comparison.open_suite import trial
from comparison.peers import Peers
from comparison.progress import Progress
from comparison.records import Record, Records
from comparison.runner import Runner
from comparison.schedule import Run, RunKey, in_pairs, still_to_do

LIMIT_LEVELS: Final = (8, 16, 32)


class OutOfTime(Exception):  # noqa: N818  (nothing went wrong)
    """The time given is used up; the rest is for another call."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """``deadline``: monotonic seconds after which no run is begun. Methods raise OutOfTime and BenchmarkError."""

    runner: Runner
    peers: Peers
    records: Records
    figures: Sequence[Figure]
    progress: Progress
    deadline: float

    def compare(self, experiments: Sequence[Experiment], pairs: int) -> None:
        """Every run that is not done yet."""
        runs = list(in_pairs(experiments, pairs))
        todo = still_to_do(runs, self.records.finished)
        for place, run in enumerate(todo, start=len(runs) - len(todo) + 1):
            results = self._do(run)
            self.progress.finished(run, results, self.figures, place, len(runs))

    def limits(self, largest: Experiment, pairs: int) -> None:
        """llama-batched-bench at the upper levels of a closed loop, once for each pair; set up as for the largest."""
        setting = self.runner.setting(largest)
        for pair in range(pairs):
            if RunKey(f"closed {LIMIT_LEVELS[-1]}", LIMIT, pair) in self.records.finished:
                continue
            self._check_time()
            self.progress.say(f"pair {pair + 1}, {LIMIT}")
            found = measure_limit(self.peers, setting, PROMPT_TOKENS, NEW_TOKENS, LIMIT_LEVELS)
            for level, speed in found.items():
                key = RunKey(f"closed {level}", LIMIT, pair)
                self.records.add(Record(key, {TOKENS_PER_S.key: round(speed, 4)}))

    def capacities(self, systems: Sequence[str]) -> dict[str, float]:
        """The capacity of each system, requests a second."""
        return {system: self._capacity(system) for system in systems}

    def _capacity(self, system: str) -> float:
        while (rate := next_rate(goodput := tried(self.records.records, system))) is not None:
            run = Run(trial(system, rate), system, 0)
            self.progress.finished(run, self._do(run), self.figures, len(goodput) + 1, len(goodput) + 1)
        return capacity(goodput)

    def _do(self, run: Run) -> Mapping[str, Any]:
        self._check_time()
        self.progress.say(f"pair {run.pair + 1}, {run.experiment.load}, {run.system} …")
        results = self.runner.do(run)
        self.records.add(Record(run.key, results))
        return results

    def _check_time(self) -> None:
        if time.monotonic() > self.deadline:
            raise OutOfTime
