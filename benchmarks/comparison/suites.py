"""The suites by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from comparison import closed_suite, figure, mixed_suites, open_suite
from comparison.capacity import LOWEST_RATE
from comparison.comparison import Comparison
from comparison.figure import Figure
from comparison.names import TREADLE

CarryOut = Callable[[Comparison, int, bool], None]
"""Does all runs of a suite: so many pairs; quick ones at fewer levels."""


@dataclass(frozen=True, slots=True)
class Suite:
    """``figures`` are those of its table, ``plotted`` those of its plots; ``case`` is what it runs by default."""

    carry_out: CarryOut
    figures: Sequence[Figure]
    plotted: Sequence[Figure]
    case: str
    about: str


def _closed(comparison: Comparison, pairs: int, quick: bool) -> None:
    experiments = closed_suite.closed(quick)
    comparison.compare(experiments, pairs)
    comparison.limits(experiments[-1], pairs)


def _staggered(comparison: Comparison, pairs: int, quick: bool) -> None:
    comparison.compare(closed_suite.staggered(quick), pairs)


def _open(comparison: Comparison, pairs: int, quick: bool) -> None:
    rates = comparison.capacities((TREADLE,) if quick else open_suite.SYSTEMS)
    comparison.compare(open_suite.open_loops(rates[TREADLE] or LOWEST_RATE), pairs)


def _overload(comparison: Comparison, pairs: int, quick: bool) -> None:
    rates = comparison.capacities(open_suite.SYSTEMS)
    comparison.compare(open_suite.overloads({name: rate or LOWEST_RATE for name, rate in rates.items()}), pairs)


def _long(comparison: Comparison, pairs: int, quick: bool) -> None:
    comparison.compare(mixed_suites.long_prompts(quick), pairs)


def _prefix(comparison: Comparison, pairs: int, quick: bool) -> None:
    comparison.compare(mixed_suites.shared_prefix(quick), pairs)


def _turns(comparison: Comparison, pairs: int, quick: bool) -> None:
    comparison.compare(mixed_suites.turns(quick), pairs)


SUITES: Final[Mapping[str, Suite]] = {
    "closed": Suite(
        _closed, figure.CLOSED, (figure.TOKENS_PER_S, figure.TTFT_P50, figure.ITL_P99), "q4_1-exact",
        "closed loops of equal requests at 1 to 32 sessions",
    ),
    "staggered": Suite(
        _staggered, figure.CLOSED, (figure.TOKENS_PER_S, figure.TTFT_P50, figure.ITL_P99), "q4_1-exact",
        "closed loops of requests of mixed lengths at 8 to 32 sessions",
    ),
    "open": Suite(
        _open, figure.OPEN, (figure.GOODPUT, figure.TTFT_P99, figure.ITL_P99), "q4_k_m-fast",
        "Poisson arrivals at shares of Treadle's capacity",
    ),
    "overload": Suite(
        _overload, figure.OPEN, (figure.GOOD_PER_S, figure.TTFT_P50, figure.REFUSAL_P99), "q4_k_m-fast",
        "five times each system's own capacity",
    ),
    "long": Suite(
        _long, figure.LONG, (figure.ITL_P99, figure.ITL_MAX, figure.LONG_TTFT), "q4_k_m-fast",
        "prompts of 700 tokens among seven streams",
    ),
    "prefix": Suite(
        _prefix, figure.PREFIX, (figure.WALL_S, figure.TTFT_P50), "q4_1-exact",
        "32 questions after a shared prefix of 400 words",
    ),
    "turns": Suite(
        _turns, figure.TURNS, (figure.FIRST_TTFT, figure.LATER_TTFT), "q4_1-exact",
        "eight conversations of four turns",
    ),
}  # fmt: skip
