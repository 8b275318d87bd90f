"""What a comparison tells while it runs, on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any

from comparison.figure import Figure
from comparison.schedule import Run

_CLEAR = "\r\x1b[K"


class Progress:
    """One line for each finished run; what happens meanwhile stands in a line that the next one replaces."""

    def __init__(self, output: IO[str] = sys.stderr) -> None:
        self._output = output
        self._terminal = output.isatty()
        self._began = time.monotonic()

    def say(self, what: str) -> None:
        """What happens now."""
        self._output.write(f"{_CLEAR}{what}" if self._terminal else f"{what}\n")
        self._output.flush()

    def finished(self, run: Run, results: Mapping[str, Any], figures: Sequence[Figure], done: int, of: int) -> None:
        """One more run is done."""
        shown = ", ".join(
            f"{figure.title} {results[figure.key]:.{figure.digits}f}"
            for figure in figures
            if results.get(figure.key) is not None
        )
        minutes = (time.monotonic() - self._began) / 60
        line = f"[{done}/{of}, {minutes:.1f} min] pair {run.pair + 1}, {run.experiment.load}, {run.system}: {shown}"
        self._output.write(f"{_CLEAR if self._terminal else ''}{line}\n")
        self._output.flush()
