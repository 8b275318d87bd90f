"""A sweep as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from treadle_shared.concurrency import ConcurrencySweep
from treadle_shared.errors import ConfigError


def write_plot(sweep: ConcurrencySweep, file: Path) -> None:
    """Throughput, occupancy and ITL over concurrency, the saturation point marked; the format is the file's suffix.

    Raises ConfigError where matplotlib is missing or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("plot", "matplotlib is not installed: pip install 'treadle[bench]'") from None
    figure = Figure(figsize=(9, 3), layout="constrained")
    panels = figure.subplots(1, 3)
    levels = [level.concurrency for level in sweep.levels]
    _panel(panels[0], levels, {"": [level.tokens_per_s for level in sweep.levels]}, "generated tokens/s", sweep)
    occupancy: dict[str, list[Any]] = {
        "average": [level.avg_occupancy for level in sweep.levels],
        "most": [level.max_occupancy for level in sweep.levels],
    }
    _panel(panels[1], levels, occupancy, "sessions a decode batch", sweep)
    itl: dict[str, list[Any]] = {
        "p50": [level.itl_ms.p50 for level in sweep.levels],
        "p99": [level.itl_ms.p99 for level in sweep.levels],
    }
    _panel(panels[2], levels, itl, "time between tokens, ms", sweep)
    try:
        figure.savefig(file)
    except (OSError, ValueError) as error:
        raise ConfigError("plot", f"{file}: {error}") from None


def _panel(axes: Any, levels: list[int], lines: dict[str, list[Any]], title: str, sweep: ConcurrencySweep) -> None:
    for label, values in lines.items():
        axes.plot(levels, values, marker="o", label=label or None)
    axes.axvline(sweep.saturation_concurrency, linestyle="--", color="grey", linewidth=1)
    axes.annotate("saturation", (sweep.saturation_concurrency, 0), xycoords=("data", "axes fraction"), rotation=90,
                  xytext=(-3, 4), textcoords="offset points", ha="right", fontsize=7, color="grey")  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xticks(levels, [str(level) for level in levels])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("concurrent sessions")
    axes.set_title(title, fontsize=9)
    if len(lines) > 1:
        axes.legend(fontsize=7)
