"""Several answers shown while they come: as lines with a number, or side by side on a terminal."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Final, Protocol, Self, TextIO

_CONTROLS: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and line feed
LINE_WIDTH: Final = 100  # a line is printed once it is this long, at the next space


class Board(Protocol):
    """Shows texts as they grow; its methods may be called from any thread."""

    def __enter__(self) -> Self:
        """Begin."""
        ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End; what is unfinished is shown."""
        ...

    def add(self, place: int, text: str) -> None:
        """Text number ``place`` went on."""
        ...

    def finish(self, place: int, note: str) -> None:
        """Text number ``place`` has ended; ``note`` says how."""
        ...


class PlainBoard:
    """Whole lines, each led by its text's number."""

    def __init__(self, titles: Sequence[str], stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self._rest = ["" for _ in titles]
        self._titles = titles

    def __enter__(self) -> Self:
        with self._lock:
            for place, title in enumerate(self._titles):
                self._print(place, f"? {title}")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._lock:
            for place in range(len(self._rest)):
                self._flush(place)

    def add(self, place: int, text: str) -> None:
        """Print what has become a line."""
        with self._lock:
            self._rest[place] += printable(text)
            while (cut := _end_of_line(self._rest[place])) is not None:
                line, self._rest[place] = self._rest[place][:cut], self._rest[place][cut:].lstrip(" \n")
                if line.strip():
                    self._print(place, line.rstrip())

    def finish(self, place: int, note: str) -> None:
        """Print the rest."""
        with self._lock:
            self._flush(place)
            self._print(place, f"({note})")

    def _flush(self, place: int) -> None:
        if self._rest[place].strip():
            self._print(place, self._rest[place].strip())
        self._rest[place] = ""

    def _print(self, place: int, line: str) -> None:
        print(f"[{place + 1}] {line}", file=self._stream, flush=True)


def printable(text: str) -> str:
    """``text`` without control characters: a model's output must not steer the terminal."""
    return _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text)


def _end_of_line(text: str) -> int | None:
    """Where to cut: at a line break, or at the last space of a line that is long enough."""
    newline = text.find("\n")
    if newline >= 0 and newline <= LINE_WIDTH:
        return newline + 1
    if len(text) <= LINE_WIDTH:
        return None
    space = text.rfind(" ", 0, LINE_WIDTH)
    return space + 1 if space > 0 else LINE_WIDTH


def make_board(titles: Sequence[str], stream: TextIO) -> Board:
    """Panels where ``stream`` is a terminal and rich is installed, else plain lines."""
    if stream.isatty():
        try:
            from treadle.cli.panels import PanelBoard
        except ImportError:
            pass
        else:
            return PanelBoard(titles)
    return PlainBoard(titles, stream)
