"""Does one run: starts the system, puts the load on it, reads off what it cost, stops it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from comparison.case import Case
from comparison.experiment import Experiment
from comparison.job import Job
from comparison.measures import first_failure
from comparison.processes import CpuTimes, cpu_times, peak_bytes
from comparison.prompts import Prompts, Tokenizer
from comparison.schedule import Run
from comparison.systems import Running, Setting, System
from comparison.trace import Trace

SEED: Final = 20_000  # pair n draws its prompts from SEED + n, the same for every system
_WARM_UP: Final = Job(prompt=tuple(range(1000, 1100)), new_tokens=8)  # ordinary tokens that no load begins with
_MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Runner:
    """Knows the systems and what is the same for every run."""

    case: Case
    systems: Mapping[str, System]
    tokenize: Tokenizer
    threads: int
    scratch: Path
    environ: Mapping[str, str]

    def do(self, run: Run) -> dict[str, Any]:
        """The run's figures. Raises BenchmarkError where the system does not start."""
        return asyncio.run(self._do(run.experiment, self.systems[run.system], run.pair))

    def setting(self, experiment: Experiment) -> Setting:
        """What an experiment's systems are set up with."""
        return Setting(
            model=self.case.model(),
            sessions=experiment.sessions,
            session_tokens=experiment.session_tokens,
            threads=self.threads,
            scratch=self.scratch,
            environ=self.environ,
            numerics=self.case.numerics,
            reuse=experiment.reuse,
            queue_depth=experiment.queue_depth,
            options=experiment.options,
        )

    async def _do(self, experiment: Experiment, system: System, pair: int) -> dict[str, Any]:
        async with system.run(self.setting(experiment)) as running:
            await running.ask(_WARM_UP, Trace(time.perf_counter()))
            running.account.begin()
            before = _Costs.of(running)
            traces = await experiment.drive(running.ask, Prompts(self.tokenize, SEED + pair))
            costs = _Costs.of(running).since(before, running, self.threads)
            costs |= running.account.figures()
        figures = experiment.measure(traces) | costs
        failure = first_failure(traces)
        return {name: _rounded(value) for name, value in figures.items()} | ({"failure": failure} if failure else {})


@dataclass(frozen=True, slots=True)
class _Costs:
    """CPU time so far, of the driver (this process) and of each of the system's processes."""

    driver_s: float
    processes: dict[str, CpuTimes]

    @classmethod
    def of(cls, running: Running) -> _Costs:
        return cls(time.process_time(), {name: cpu_times(pid) for name, pid in running.pids.items()})

    def since(self, earlier: _Costs, running: Running, model_threads: int) -> dict[str, float]:
        """Seconds of CPU time spent since, and the peak memory of all processes together.

        ``outside_cpu_s`` is what was spent outside the model: by every process but the one that computes, and by
        that one in all but its busiest threads, as many as compute.
        """
        spent = {name: times.since(earlier.processes[name]) for name, times in self.processes.items()}
        outside = {
            name: times.outside_model(model_threads) if name == running.model else times.total_s
            for name, times in spent.items()
        }
        return {
            "driver_cpu_s": self.driver_s - earlier.driver_s,
            **{f"{name}_cpu_s": times.total_s for name, times in spent.items()},
            "outside_cpu_s": sum(outside.values()),
            "peak_mib": sum(peak_bytes(pid) for pid in running.pids.values()) / _MIB,
        }


def _rounded(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value
