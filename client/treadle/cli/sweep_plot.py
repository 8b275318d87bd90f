"""A sweep as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from treadle_shared.concurrency import ConcurrencySweep
from treadle_shared.errors import ConfigError


def check_plot(file: Path) -> None:
    """Raise ConfigError where ``file`` cannot become a plot, before anything is measured for it."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise ConfigError("plot", "matplotlib is not installed: pip install matplotlib") from None
    formats = FigureCanvasBase.get_supported_filetypes()
    if file.suffix.lstrip(".").lower() not in formats:
        raise ConfigError("plot", f"{file}: not a picture's name; it may end in {', '.join(sorted(formats))}")
    if not file.parent.is_dir():
        raise ConfigError("plot", f"{file}: there is no directory {file.parent}")


def write_plot(sweep: ConcurrencySweep, file: Path) -> None:
    """Throughput, occupancy and ITL over concurrency, the saturation point marked; the format is the file's suffix.

    For a file that passed ``check_plot``. Raises ConfigError where it cannot be written.
    """
    from matplotlib.figure import Figure

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
