"""Open loops: requests that come when they come, up to and far beyond what a system can bear."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from comparison.capacity import trial_name
from comparison.closed_suite import SESSION_TOKENS, mixed_job
from comparison.experiment import Experiment
from comparison.job import Ask
from comparison.loads import open_loop, poisson_arrivals
from comparison.measures import measured
from comparison.names import SERVERS, TREADLE
from comparison.prompts import Prompts
from comparison.trace import Trace
from comparison.treadle_system import known

SYSTEMS: Final = (TREADLE, *SERVERS)
SHARES: Final = (0.5, 0.8, 1.2)
OVERLOAD: Final = 5.0
SEARCH_S: Final = 40.0  # at a request a second, 5 % of the requests are two
LOAD_S: Final = 30.0
OVERLOAD_S: Final = 20.0
PATIENCE_S: Final = 15.0  # a request that has not ended by then is not a good one: the longest answer takes half of it
SESSIONS: Final = 16
QUEUE_DEPTH: Final = 2  # who waits two seconds for a first token might as well be refused: two leave in half that time
OPTIONS: Final[Mapping[str, Any]] = {"target_itl_ms": 200, "target_ttft_ms": 1600}  # four fifths of what is good


def trial(system: str, rate: float) -> Experiment:
    """One step of the search for a system's capacity."""
    return _experiment(trial_name(rate), rate, SEARCH_S, (system,))


def open_loops(rate: float) -> list[Experiment]:
    """The same rates for all systems, as shares of the capacity ``rate``."""
    return [_experiment(f"open {share:g}", share * rate, LOAD_S, SYSTEMS) for share in SHARES]


def overloads(rates: Mapping[str, float]) -> list[Experiment]:
    """Every system at its own capacity and at five times that."""
    experiments = []
    for system, rate in rates.items():
        experiments.append(_experiment("at capacity", rate, OVERLOAD_S, (system,)))
        experiments.append(_experiment(f"overload {OVERLOAD:g}x", OVERLOAD * rate, OVERLOAD_S, (system,)))
    return experiments


class _Poisson:
    def __init__(self, rate: float, seconds: float) -> None:
        self._rate = rate
        self._seconds = seconds

    async def __call__(self, ask: Ask, prompts: Prompts) -> list[Trace]:
        arrivals = poisson_arrivals(self._rate, self._seconds, prompts.random)
        return await open_loop(ask, [mixed_job(prompts) for _ in arrivals], arrivals, PATIENCE_S)


class _Measured:
    """The usual figures, the rate, and good requests a second of the time in which requests came."""

    def __init__(self, rate: float, seconds: float) -> None:
        self._rate = rate
        self._seconds = seconds

    def __call__(self, traces: Sequence[Trace]) -> dict[str, Any]:
        found = measured(traces)
        return found | {"rate_per_s": self._rate, "good_per_s": found["good"] / self._seconds}


def _experiment(load: str, rate: float, seconds: float, systems: tuple[str, ...]) -> Experiment:
    return Experiment(
        load=load,
        paired=systems,
        sessions=SESSIONS,
        session_tokens=SESSION_TOKENS,
        drive=_Poisson(rate, seconds),
        measure=_Measured(rate, seconds),
        queue_depth=QUEUE_DEPTH,
        options=known(OPTIONS),
    )
