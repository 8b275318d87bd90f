"""Results as Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from comparison.capacity import capacities, is_trial
from comparison.figure import Figure
from comparison.names import LIMIT, PYTHON, SERVERS, TREADLE, TREADLE_ITL
from comparison.ratios import Range, better, paired_ratios, values
from comparison.records import Record, Records

_MINE: Final = (TREADLE, TREADLE_ITL)
_WORKER_HEADS: Final = (
    "decode", "prefill", "sampling", "worker's rest", "no tick to run", "ticks", "decode rows a tick",
    "prefill rows a tick",
)  # fmt: skip
_NOTHING: Final = "-"


def report(records: Records, figures: Sequence[Figure], title: str) -> str:
    """Every figure of every load and system, then the paired ratios. The steps of a search for a capacity are left
    out; what it found is told.
    """
    facts = ", ".join(f"{name} {value}" for name, value in records.facts.items())
    parts = [f"## {title}", f"{facts}. Median (least..greatest) of the runs; the number of runs in brackets."]
    parts.append(table(("load", "system", *(figure.title for figure in figures)), _rows(records, figures)))
    if found := capacities(records.records):
        told = ", ".join(f"{system} {rate:g}" for system, rate in found.items())
        parts.append(f"Capacity, requests a second: {told}.")
    if ratios := list(_ratio_rows(records, [figure for figure in figures if figure.rated])):
        parts.append("Ratios of the pairs:")
        parts.append(table(("load", "system", "figure", "to", "ratio", "runs"), ratios))
    if spent := list(_worker_rows(records)):
        parts.append("Where Treadle's worker spent the wall time, % of it (one run of each load, the last):")
        parts.append(table(("load", "system", *_WORKER_HEADS), spent))
    if problems := list(_problems(records.records)):
        parts.append("Not all went well: " + "; ".join(problems))
    return "\n\n".join(parts) + "\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def loads(records: Sequence[Record]) -> list[str]:
    """In the order in which they were first run, without the steps of searches."""
    return [load for load in dict.fromkeys(record.key.load for record in records) if not is_trial(load)]


def systems(records: Sequence[Record], load: str) -> list[str]:
    """Those with results under a load; Treadle leads."""
    found = dict.fromkeys(record.key.system for record in records if record.key.load == load)
    return sorted(found, key=lambda name: (name not in _MINE, name))


def _rows(records: Records, figures: Sequence[Figure]) -> Iterator[list[str]]:
    for load in loads(records.records):
        for system in systems(records.records, load):
            runs = records.of(load, system)
            yield [load, f"{system} [{len(runs)}]", *(_text(runs, figure) for figure in figures)]


def _text(runs: Sequence[Record], figure: Figure) -> str:
    found = Range.of(values(runs, figure.key).values())
    return found.text(figure.digits) if found else _NOTHING


def _ratio_rows(records: Records, figures: Sequence[Figure]) -> Iterator[list[str]]:
    for load in loads(records.records):
        for system in (name for name in systems(records.records, load) if name in _MINE):
            for figure in figures:
                yield from _ratios(records, load, system, figure)


def _ratios(records: Records, load: str, system: str, figure: Figure) -> Iterator[list[str]]:
    """To every other system; the llama-server configuration with the better median is marked."""
    mine = records.of(load, system)
    best = better({name: records.of(load, name) for name in SERVERS}, figure.key, figure.higher_is_better)
    for peer in (*SERVERS, PYTHON, LIMIT):
        if found := paired_ratios(mine, theirs := records.of(load, peer), figure.key):
            marked = f"**{peer}**" if peer == best else peer
            yield [load, system, figure.title, marked, found.text(2), str(min(len(mine), len(theirs)))]


def _worker_rows(records: Records) -> Iterator[list[str]]:
    for load in loads(records.records):
        for system in (name for name in systems(records.records, load) if name in _MINE):
            figures = records.of(load, system)[-1].figures
            if figures.get("worker_ticks"):
                yield [load, system, *_worker_shares(figures)]


def _worker_shares(figures: Mapping[str, Any]) -> list[str]:
    """Shares of the wall time, what is left of it, and the rows of a tick."""
    parts = [figures[f"worker_{name}_s"] / figures["wall_s"] for name in ("decode", "prefill", "sample", "rest")]
    ticks = figures["worker_ticks"]
    rows = [f"{figures[f'worker_{name}_rows'] / ticks:.1f}" for name in ("decode", "prefill")]
    return [*(f"{100 * part:.1f}" for part in (*parts, 1 - sum(parts))), f"{ticks:.0f}", *rows]


def _problems(records: Sequence[Record]) -> Iterator[str]:
    for record in records:
        failed: Any = record.figures.get("failed")
        if failed:
            why = record.figures.get("failure", "")
            yield f"{record.key.system}, {record.key.load}, pair {record.key.pair}: {failed} failed ({why})"
