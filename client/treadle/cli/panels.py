"""Answers side by side on a terminal. Needs rich."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Final, Self

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from treadle.cli.board import printable

REFRESHES_A_SECOND: Final = 12  # smooth to the eye; each redraws the whole grid
FRAME_ROWS: Final = 2  # top and bottom border of a panel
FRAME_COLUMNS: Final = 4  # left and right border with their padding
LEAST_ROWS: Final = 2


class PanelBoard:
    """Two columns of panels, each with the newest lines of its text."""

    def __init__(self, titles: Sequence[str]) -> None:
        self._titles = titles
        self._texts = ["" for _ in titles]
        self._notes = ["" for _ in titles]
        self._lock = threading.Lock()
        self._console = Console()
        self._live = Live(get_renderable=self._grid, console=self._console, refresh_per_second=REFRESHES_A_SECOND)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._live.__exit__(kind, error, at)

    def add(self, place: int, text: str) -> None:
        """Seen at the next refresh."""
        with self._lock:
            self._texts[place] += printable(text)

    def finish(self, place: int, note: str) -> None:
        """The note goes to the panel's foot."""
        with self._lock:
            self._notes[place] = note

    def _grid(self) -> Group:
        columns = 2
        rows = -(-len(self._titles) // columns)
        width = self._console.width // columns
        height = max(LEAST_ROWS, (self._console.height - 1) // rows - FRAME_ROWS)
        grid = Table.grid(expand=True)
        for _ in range(columns):
            grid.add_column(width=width)
        with self._lock:
            panels = [self._panel(place, width - FRAME_COLUMNS, height) for place in range(len(self._titles))]
        for first in range(0, len(panels), columns):
            grid.add_row(*panels[first : first + columns])
        return Group(grid)

    def _panel(self, place: int, width: int, height: int) -> Panel:
        lines = Text(self._texts[place].strip()).wrap(self._console, width)
        newest = Text("\n").join(list(lines)[-height:])
        note = self._notes[place]
        return Panel(
            newest,
            title=Text(self._titles[place]),
            title_align="left",
            subtitle=Text(note) if note else None,
            subtitle_align="right",
            border_style="green" if note else "cyan",
            height=height + FRAME_ROWS,
        )
