"""``treadle demo``: a node of its own, eight answers at once, and what they cost."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from treadle.cli import exits
from treadle.cli.board import Board, make_board
from treadle.cli.node_flags import add_node_flags, flags_of
from treadle.cli.progress import Progress
from treadle.cli.settle import held, settled_status
from treadle.cli.stopwatch import Stopwatch
from treadle.client import Client
from treadle.events import TextDelta
from treadle.session import Session
from treadle.supervise import BackgroundNode, prepare_node
from treadle_shared.concurrency import percentile

QUESTIONS: Final = (
    "Why is the sky blue?",
    "What is a black hole?",
    "How do vaccines work?",
    "Why do cats purr?",
    "What makes bread rise?",
    "How does a compass find north?",
    "Why do leaves change colour in autumn?",
    "What causes the tides?",
)
DEFAULTS: Final = {"max_sessions": len(QUESTIONS), "session_tokens": 1024, "log_format": "json"}
MAX_TOKENS: Final = 128
LOG_LINES: Final = 15  # of the node's own log, shown where it does not start


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "--max-tokens", type=int, default=MAX_TOKENS, metavar="N", help=f"of each answer ({MAX_TOKENS})"
    )
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON object")
    add_node_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Exit code 0 where every answer came and nothing is held afterwards, else 1, or that of the failed start."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the node is stopped too
    with tempfile.TemporaryDirectory(prefix="treadle-demo-") as folder:
        runtime_dir = args.runtime_dir or str(Path(folder) / "node")
        node = prepare_node(runtime_dir, None, DEFAULTS | flags_of(args))
        progress = Progress(sys.stderr)
        log = Path(folder) / "node.log"
        with log.open("wb") as output, BackgroundNode(node, output, progress.say, progress.show) as background:
            facts = background.wait_ready()
            progress.clear()
            if facts is None:
                print(_end_of(log), file=sys.stderr)
                return background.stop() or exits.FAILED
            summary = _stream(str(node.directory.path), args.max_tokens)
            print(json.dumps(summary) if args.json else describe(summary, facts), flush=True)
            stopped = background.stop()
    return exits.OK if summary["finished"] == len(QUESTIONS) and summary["idle"] and not stopped else exits.FAILED


@dataclass(frozen=True, slots=True)
class _Answer:
    session: Session
    watch: Stopwatch


def _stream(runtime_dir: str, max_tokens: int) -> dict[str, Any]:
    """Ask everything at once and measure."""
    board = make_board(QUESTIONS, sys.stdout)
    began = time.perf_counter()
    with ThreadPoolExecutor(len(QUESTIONS)) as threads, Client(runtime_dir) as client:  # the client ends first
        with board:
            jobs = [threads.submit(_ask, client, board, place, max_tokens) for place in range(len(QUESTIONS))]
            answers = [job.result() for job in jobs]
        wall_s = time.perf_counter() - began
        return _summary(answers, wall_s, settled_status(client)["telemetry"])


def _ask(client: Client, board: Board, place: int, max_tokens: int) -> _Answer:
    watch = Stopwatch()
    session = client.chat([{"role": "user", "content": QUESTIONS[place]}], max_tokens=max_tokens)
    for event in session.events():
        if isinstance(event, TextDelta):
            watch.came(len(event.tokens))
            board.add(place, event.text)
    board.finish(place, f"{session.finish_reason}, {watch.tokens} tokens")
    return _Answer(session, watch)


def _summary(answers: Sequence[_Answer], wall_s: float, telemetry: dict[str, Any]) -> dict[str, Any]:
    first = [answer.watch.first_token_s for answer in answers if answer.watch.first_token_s is not None]
    between = [gap for answer in answers for gap in answer.watch.between_tokens_s]
    tokens = sum(answer.watch.tokens for answer in answers)
    left = held(telemetry)
    return {
        "answers": len(answers),
        "finished": sum(answer.session.finish_reason in ("stop", "length") for answer in answers),
        "tokens": tokens,
        "wall_s": wall_s,
        "tokens_per_s": tokens / wall_s,
        "occupancy_avg": telemetry["batch_occupancy_avg"],
        "occupancy_max": telemetry["batch_occupancy_max"],
        "ttft_p50_s": percentile(first, 0.50),
        "ttft_p99_s": percentile(first, 0.99),
        "itl_p50_s": percentile(between, 0.50),
        "itl_p99_s": percentile(between, 0.99),
        **left,
        "idle": not any(left.values()),
    }


def describe(summary: dict[str, Any], facts: dict[str, Any]) -> str:
    """The summary for people."""
    ms = {name: summary[name] * 1000 for name in ("ttft_p50_s", "ttft_p99_s", "itl_p50_s", "itl_p99_s")}
    return "\n".join(
        (
            "",
            f"model        {facts.get('model')} (exact: {'yes' if facts.get('exact') else 'no'})",
            f"answers      {summary['finished']} of {summary['answers']} complete, {summary['tokens']} tokens "
            f"in {summary['wall_s']:.1f} s",
            f"throughput   {summary['tokens_per_s']:.1f} tokens/s",
            f"occupancy    {summary['occupancy_avg']:.2f} sessions a tick, {summary['occupancy_max']} at most",
            f"first token  p50 {ms['ttft_p50_s']:.0f} ms, p99 {ms['ttft_p99_s']:.0f} ms",
            f"next token   p50 {ms['itl_p50_s']:.1f} ms, p99 {ms['itl_p99_s']:.1f} ms",
            f"left behind  {summary['kv_bytes']} bytes of live KV, {summary['active_sessions']} slots, "
            f"{summary['queue_depth']} queued",
        )
    )


def _end_of(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])
