"""``treadle tail``: a node's telemetry, one JSON object a line."""

from __future__ import annotations

import argparse
import json
from typing import Any

from treadle.cli import exits
from treadle.tail import TOPICS, Gap, TelemetryEvent, TelemetryTail


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "--topic", action="append", choices=TOPICS, help="only this topic; may be repeated (default: all)"
    )
    parser.add_argument("--count", type=_lines, metavar="N", help="leave after N lines; it waits for them")
    parser.add_argument("--json", action="store_true", help="JSON lines (it prints nothing else)")


def _lines(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a number of at least 1, not {text}")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Print what comes until interrupted, or ``--count`` lines. What is missed is fetched, and a gap has a line too."""
    left = args.count
    with TelemetryTail(args.runtime_dir, tuple(args.topic or ())) as tail:
        for item in tail:
            print(json.dumps(line_of(item)), flush=True)
            left = None if left is None else left - 1
            if left is not None and left <= 0:
                break
    return exits.OK


def line_of(item: TelemetryEvent | Gap) -> dict[str, Any]:
    """An event or a gap as one JSON-safe map."""
    if isinstance(item, Gap):
        missed = item.last - item.first + 1
        return {
            "topic": "gap",
            "of": item.topic,
            "first": item.first,
            "last": item.last,
            "recovered": item.recovered,
            "lost": missed - item.recovered,
        }
    head: dict[str, Any] = {"topic": item.topic, "sequence": item.sequence}
    if item.replayed:
        head["replayed"] = True
    return head | item.facts | head
