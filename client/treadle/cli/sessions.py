"""``treadle sessions``: what waits and runs on a node, of all clients."""

from __future__ import annotations

import argparse
import json
from typing import Any

from treadle.cli import exits
from treadle.control import Control


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the sessions, one a line."""
    with Control(args.runtime_dir) as control:
        facts = control.sessions()
    print(json.dumps(facts) if args.json else table(facts.get("sessions", [])))
    return exits.OK


def table(rows: list[dict[str, Any]]) -> str:
    """Rows of equal keys in columns, led by their names."""
    if not rows:
        return "no sessions"
    names = list(rows[0])
    cells = [names, *([_cell(row.get(name)) for name in names] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(names))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in cells
    )


def _cell(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else "" if value is None else str(value)
