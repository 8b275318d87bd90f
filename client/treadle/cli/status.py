"""``treadle status``: exit code 0 where the node is ready, 1 where it is not yet, 69 where there is none."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any, Final

from treadle.cli import exits
from treadle.control import Control
from treadle.errors import CallTimeout, Unavailable

WAIT_TIMEOUT_S: Final = 600.0  # a large model loads from a slow disk in minutes
POLL_S: Final = 0.1  # between two looks at a node that is not ready
CONNECT_S: Final = 2.0  # a broker that is there answers in milliseconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--wait", action="store_true", help="return when the node is ready")
    parser.add_argument(
        "--timeout", type=float, default=WAIT_TIMEOUT_S, metavar="S", help="with --wait: at most this long (600)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print how the node stands."""
    facts = _until_ready(args.runtime_dir, args.timeout) if args.wait else _ask(args.runtime_dir, CONNECT_S)
    print(json.dumps(facts) if args.json else describe(facts))
    return exits.OK if facts.get("ready") else exits.FAILED


def _until_ready(runtime_dir: str | None, timeout_s: float) -> dict[str, Any]:
    """The first facts that say ready, or the last there were. Raises Unavailable where there never were any."""
    deadline = time.monotonic() + timeout_s
    facts: dict[str, Any] = {}
    while not facts.get("ready"):
        left = deadline - time.monotonic()
        try:
            facts = _follow(runtime_dir, deadline)
        except (Unavailable, CallTimeout):  # it may be about to start
            if left <= 0 and not facts:
                raise
        if left <= 0:
            break
        time.sleep(POLL_S)
    return facts


def _follow(runtime_dir: str | None, deadline: float) -> dict[str, Any]:
    """The facts of one connection: the first that say ready, or those at the deadline."""
    with Control(runtime_dir, timeout=min(CONNECT_S, max(POLL_S, deadline - time.monotonic()))) as control:
        while True:
            facts = control.status()
            if facts.get("ready") or time.monotonic() >= deadline:
                return facts
            time.sleep(POLL_S)


def _ask(runtime_dir: str | None, timeout_s: float) -> dict[str, Any]:
    with Control(runtime_dir, timeout=timeout_s) as control:
        return control.status()


def describe(facts: dict[str, Any]) -> str:
    """The facts for people: one a line, the telemetry's indented."""
    lines = []
    for key, value in facts.items():
        if isinstance(value, dict):
            lines.append(f"{key}:")
            lines += [f"  {name}: {_plain(item)}" for name, item in value.items()]
        else:
            lines.append(f"{key}: {_plain(value)}")
    return "\n".join(lines)


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3f}"
    return json.dumps(value) if isinstance(value, dict | list) else str(value)
