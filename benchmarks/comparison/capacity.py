"""The search for a system's capacity: the highest rate of Poisson arrivals with goodput ≥ 0.95."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from comparison.records import Record

ENOUGH: Final = 0.95
STEP: Final = 1.12  # neighbouring rates differ by this: closer ones are within the noise of one run
LOWEST_RATE: Final = 0.25  # requests a second
RATES: Final = tuple(round(LOWEST_RATE * STEP**place, 3) for place in range(32))  # up to 8.4 a second

_TRIAL: Final = "capacity "


def trial_name(rate: float) -> str:
    """The load of a step of the search."""
    return f"{_TRIAL}{rate:g}"


def is_trial(load: str) -> bool:
    """Whether a load is a step of the search."""
    return load.startswith(_TRIAL)


def tried(records: Sequence[Record], system: str) -> dict[float, float]:
    """The goodput of one system at each rate tried."""
    steps = [record for record in records if record.key.system == system and is_trial(record.key.load)]
    return {float(record.key.load.removeprefix(_TRIAL)): float(record.figures["goodput"]) for record in steps}


def capacities(records: Sequence[Record]) -> dict[str, float]:
    """What the searches found, by system; those that are not over are left out."""
    steps = {name: tried(records, name) for name in dict.fromkeys(record.key.system for record in records)}
    return {name: capacity(goodput) for name, goodput in steps.items() if goodput and next_rate(goodput) is None}


def next_rate(goodput: Mapping[float, float], rates: tuple[float, ...] = RATES) -> float | None:
    """The rate to try next, knowing the goodput at those tried; None when the search is over.

    Bisection: goodput is taken to fall with the rate.
    """
    low, high = _bounds(goodput, rates)
    untried = range(low + 1, high)
    return rates[untried[len(untried) // 2]] if untried else None


def capacity(goodput: Mapping[float, float], rates: tuple[float, ...] = RATES) -> float:
    """What the search has found so far; 0 where even the lowest rate was too much."""
    low, _ = _bounds(goodput, rates)
    return rates[low] if low >= 0 else 0.0


def _bounds(goodput: Mapping[float, float], rates: tuple[float, ...]) -> tuple[int, int]:
    """Places of the highest rate known to be borne, -1 for none, and of the lowest above it that was not."""
    low, high = -1, len(rates)
    for place, rate in enumerate(rates):
        if rate not in goodput:
            continue
        if goodput[rate] >= ENOUGH and place < high:
            low = place
        elif goodput[rate] < ENOUGH:
            high = min(high, place)
    return low, high
