"""What people see while a node starts and answers stream."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest

from treadle.cli.board import LINE_WIDTH, PlainBoard, make_board, printable
from treadle.cli.progress import QUIET_S, Progress
from treadle.cli.stopwatch import Stopwatch
from treadle_shared.concurrency import percentile


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


class Clock:
    """A clock that goes when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def _loading(load: float) -> dict[str, Any]:
    return {"ready": False, "phase": "loading", "load": load}


def test_without_a_terminal_progress_is_a_line_for_each_step() -> None:
    out, clock = io.StringIO(), Clock()
    progress = Progress(out, clock)
    for facts in (None, None, _loading(0.1), _loading(0.12), _loading(0.5), {"phase": "testing", "load": 1.0}):
        progress.show(facts)
    assert out.getvalue().splitlines() == [
        "treadle: starting the broker",
        "treadle: loading the model 10%",
        "treadle: loading the model 50%",
        "treadle: testing the model",
    ]


def test_without_news_a_line_now_and_then_says_that_it_goes_on() -> None:
    out, clock = io.StringIO(), Clock()
    progress = Progress(out, clock)
    for _ in range(100):
        progress.show(_loading(0.1))
        clock.now += QUIET_S / 10
    assert len(out.getvalue().splitlines()) == 10


@pytest.mark.parametrize(("phase", "load"), [("ready", 1.0), ("loading", 0.43)])
def test_a_node_that_drains_is_called_nothing_else(phase: str, load: float) -> None:
    out = io.StringIO()
    Progress(out, Clock()).show({"ready": False, "reason": "draining", "phase": phase, "load": load})
    assert out.getvalue() == "treadle: draining\n"


def test_on_a_terminal_progress_is_one_line_that_goes_away() -> None:
    out = Terminal()
    progress = Progress(out)
    progress.show(_loading(0.1))
    progress.show(_loading(0.1))
    progress.show(_loading(0.2))
    progress.clear()
    text = out.getvalue()
    assert "\n" not in text
    assert text.count("loading the model") == 2
    assert text.endswith("\r\x1b[2K")


def test_a_board_prints_whole_lines_with_their_number() -> None:
    out = io.StringIO()
    with PlainBoard(["one?", "two?"], out) as board:
        for piece in ("first ", "answer\n", "\n", "rest"):
            board.add(0, piece)
        board.add(1, "word " * 40)
        board.finish(0, "stop")
    lines = out.getvalue().splitlines()
    assert lines[:3] == ["[1] ? one?", "[2] ? two?", "[1] first answer"]
    assert "[1] rest" in lines
    assert "[1] (stop)" in lines
    assert all(len(line) <= LINE_WIDTH + 4 for line in lines)
    assert " ".join(line[4:] for line in lines if line.startswith("[2] w")).split() == ["word"] * 40


def test_a_word_longer_than_a_line_is_cut() -> None:
    out = io.StringIO()
    with PlainBoard(["?"], out) as board:
        board.add(0, "x" * 250)
    assert [len(line) - 4 for line in out.getvalue().splitlines()[1:]] == [LINE_WIDTH, LINE_WIDTH, 50]


def test_a_models_output_cannot_steer_the_terminal() -> None:
    assert printable("a\x1b[2Jb\x07\tc\n\x9b") == "a�[2Jb�\tc\n�"


def test_a_pipe_gets_the_plain_board() -> None:
    assert isinstance(make_board(["?"], io.StringIO()), PlainBoard)


def test_a_stopwatch_tells_first_and_next_tokens_apart() -> None:
    clock = Clock()
    watch = Stopwatch(clock)
    for now, tokens in ((2.0, 1), (2.5, 1), (2.5, 0), (4.0, 2)):
        clock.now = now
        watch.came(tokens)
    assert watch.first_token_s == 2.0
    assert watch.between_tokens_s == [0.5, 1.5, 0.0]
    assert watch.tokens == 4


def test_a_percentile_is_a_value_that_was_measured() -> None:
    values = [float(n) for n in range(1, 101)]
    assert (percentile(values, 0.5), percentile(values, 0.99), percentile(values, 1.0)) == (50.0, 99.0, 100.0)
    assert percentile([7.0], 0.01) == 7.0
    assert math.isnan(percentile([], 0.5))


def test_panels_hold_the_newest_lines() -> None:
    panels = pytest.importorskip("treadle.cli.panels")
    board = panels.PanelBoard(["one?", "two?"])
    board.add(0, "\x1b[31mred\n" + "line\n" * 500 + "last")
    board.finish(0, "stop")
    text = _rendered(board)
    assert "last" in text
    assert "stop" in text
    assert "red" not in text


def _rendered(board: Any) -> str:
    with board._console.capture() as capture:
        board._console.print(board._grid())
    return str(capture.get())
