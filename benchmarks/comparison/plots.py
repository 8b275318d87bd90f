"""Results as pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from comparison.errors import BenchmarkError
from comparison.figure import Figure
from comparison.names import LIMIT, PYTHON, SPLIT, TREADLE, TREADLE_ITL, UNIFIED
from comparison.ratios import Range, values
from comparison.records import Records
from comparison.report import systems

_COLOURS: Final = {
    TREADLE: "#1b6ca8",
    TREADLE_ITL: "#5ab0e8",
    SPLIT: "#d1603d",
    UNIFIED: "#e3a587",
    PYTHON: "#8a8a8a",
    LIMIT: "#222222",
}
_PANEL: Final = (4.6, 3.4)  # inches


def plot(records: Records, names: Sequence[str], figures: Sequence[Figure], title: str, file: Path) -> None:
    """One panel a figure, of the loads ``names``: over their levels where they have such, else a bar for each system
    and load.

    The whiskers reach from the least to the greatest value. Raises BenchmarkError where matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure as Canvas
    except ImportError:
        raise BenchmarkError("matplotlib is not installed: pip install 'treadle[bench]'") from None
    canvas = Canvas(figsize=(_PANEL[0] * len(figures), _PANEL[1]), layout="constrained")
    canvas.suptitle(title, fontsize=10)
    panels = canvas.subplots(1, len(figures), squeeze=False)[0]
    for panel, figure in zip(panels, figures, strict=True):
        panel.set_title(figure.title, fontsize=9)
        (_lines if _levels(names) else _bars)(panel, records, names, figure)
        panel.set_ylim(bottom=0)
        panel.tick_params(labelsize=8)
    handles = {
        label: handle for panel in panels for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    canvas.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    canvas.savefig(file)


def _levels(names: Sequence[str]) -> bool:
    """Whether the loads are one load at several levels, such as ``closed 8`` and ``closed 16``."""
    kinds = {name.rpartition(" ")[0] for name in names}
    return len(names) > 1 and len(kinds) == 1 and all(name.rpartition(" ")[2].isdigit() for name in names)


def _lines(panel: Any, records: Records, names: Sequence[str], figure: Figure) -> None:
    places = {name: int(name.rpartition(" ")[2]) for name in names}
    for system in _all_systems(records, names):
        points = [(places[name], found) for name in names if (found := _range(records, name, system, figure))]
        if points:
            _whiskers(panel.errorbar, [place for place, _ in points], [found for _, found in points], system)
    panel.set_xscale("log", base=2)
    panel.set_xticks(list(places.values()), [str(level) for level in places.values()])
    panel.set_xlabel("sessions", fontsize=8)


def _bars(panel: Any, records: Records, names: Sequence[str], figure: Figure) -> None:
    present = _all_systems(records, names)
    width = 0.8 / max(len(present), 1)
    for number, system in enumerate(present):
        points = [
            (place, found) for place, name in enumerate(names) if (found := _range(records, name, system, figure))
        ]
        if points:
            lefts = [place + (number - (len(present) - 1) / 2) * width for place, _ in points]
            _bar(panel, lefts, [found for _, found in points], system, width)
    panel.set_xticks(range(len(names)), names, fontsize=8)


def _whiskers(draw: Any, places: Sequence[float], found: Sequence[Range], system: str) -> None:
    dashes = "--" if system == LIMIT else "-"
    draw(places, [one.median for one in found], yerr=_reach(found), marker="o", markersize=4, capsize=2, label=system,
         color=_COLOURS.get(system), linestyle=dashes, linewidth=1.5)  # fmt: skip


def _bar(panel: Any, places: Sequence[float], found: Sequence[Range], system: str, width: float) -> None:
    panel.bar(places, [one.median for one in found], width, yerr=_reach(found), capsize=2, label=system,
              color=_COLOURS.get(system))  # fmt: skip


def _reach(found: Sequence[Range]) -> list[list[float]]:
    return [[one.median - one.least for one in found], [one.greatest - one.median for one in found]]


def _range(records: Records, load: str, system: str, figure: Figure) -> Range | None:
    return Range.of(values(records.of(load, system), figure.key).values())


def _all_systems(records: Records, names: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(system for name in names for system in systems(records.records, name)))
