"""What pairs of runs say together."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from comparison.records import Record


@dataclass(frozen=True, slots=True)
class Range:
    """The median of some values, and the least and the greatest."""

    median: float
    least: float
    greatest: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Range | None:
        """None of nothing."""
        known = sorted(values)
        return cls(statistics.median(known), known[0], known[-1]) if known else None

    def text(self, digits: int) -> str:
        """Such as ``1.04 (0.99..1.08)``; one value stands alone."""
        if self.least == self.greatest:
            return f"{self.median:.{digits}f}"
        return f"{self.median:.{digits}f} ({self.least:.{digits}f}..{self.greatest:.{digits}f})"


def values(records: Sequence[Record], figure: str) -> dict[int, float]:
    """A figure by pair, where a run has it."""
    return {record.key.pair: value for record in records if (value := record.figures.get(figure)) is not None}


def paired_ratios(mine: Sequence[Record], theirs: Sequence[Record], figure: str) -> Range | None:
    """Mine to theirs, pair by pair; pairs of which one is missing, or theirs is 0, do not count."""
    ours, others = values(mine, figure), values(theirs, figure)
    return Range.of(ours[pair] / others[pair] for pair in ours if others.get(pair))


def better(candidates: dict[str, Sequence[Record]], figure: str, higher_is_better: bool) -> str | None:
    """The candidate whose median of a figure is the best; None where none has it."""
    medians = {
        name: found.median
        for name, records in candidates.items()
        if (found := Range.of(values(records, figure).values()))
    }
    if not medians:
        return None
    return (max if higher_is_better else min)(medians, key=lambda name: medians[name])
