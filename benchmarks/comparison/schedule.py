"""Which runs a comparison takes, in which order, and which of them are still to be done."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from comparison.experiment import Experiment


@dataclass(frozen=True, slots=True)
class RunKey:
    """What tells a run from every other of its suite and case."""

    load: str
    system: str
    pair: int


@dataclass(frozen=True, slots=True)
class Run:
    """One system under one load, once."""

    experiment: Experiment
    system: str
    pair: int

    @property
    def key(self) -> RunKey:
        """Its key."""
        return RunKey(self.experiment.load, self.system, self.pair)


def in_pairs(experiments: Sequence[Experiment], pairs: int) -> Iterator[Run]:
    """All runs: a pair puts every load on every system in turn, in reversed order every other time, so that what
    drifts on the machine, and what one run leaves for the next, falls on all alike.
    """
    for pair in range(pairs):
        for experiment in experiments:
            systems = [*experiment.paired, *(experiment.single if pair == 0 else ())]
            for system in reversed(systems) if pair % 2 else systems:
                yield Run(experiment, system, pair)


def still_to_do(runs: Iterable[Run], finished: Collection[RunKey]) -> list[Run]:
    """Those that have no result yet."""
    return [run for run in runs if run.key not in finished]
