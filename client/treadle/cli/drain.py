"""``treadle drain``: refuse what is new, finish what runs, stop the node; returns when it has stopped."""

from __future__ import annotations

import argparse
import json
import time
from typing import Final

from treadle.cli import exits
from treadle.control import Control
from treadle_shared.rundir import RuntimeDir, find_runtime_dir

POLL_S: Final = 0.05  # between two looks at the lock
GRACE_S: Final = 10.0  # for the broker to cancel what is left and go, after the drain's own timeout
DEFAULT_TIMEOUT_S: Final = 3600.0  # without --timeout the node's own setting ends the drain; this only bounds the wait


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--timeout", type=float, metavar="S", help="cancel what still runs then (default: the node's)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Exit code 0 where the node has stopped, 1 where it is still there after the timeout and a grace."""
    directory = find_runtime_dir(args.runtime_dir)
    with Control(directory.path) as control:
        facts = control.drain(args.timeout)
    stopped = _stopped(directory, (args.timeout or DEFAULT_TIMEOUT_S) + GRACE_S)
    print(json.dumps({**facts, "stopped": stopped}) if args.json else "drained" if stopped else "still draining")
    return exits.OK if stopped else exits.FAILED


def _stopped(directory: RuntimeDir, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while directory.is_live():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True
