"""``treadle cancel``: end one session, whoever's it is."""

from __future__ import annotations

import argparse
import json

from treadle.cli import exits
from treadle.control import Control


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("session_id", metavar="ID", help="the exact id, as `treadle sessions` prints it")
    parser.add_argument("--epoch", type=int, help="which use of the id (default: the newest)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Exit code 0 where the session was found, 1 where it is unknown or has ended."""
    with Control(args.runtime_dir) as control:
        found = control.cancel(args.session_id, args.epoch)
    answer = "cancelled" if found else "no live session has that id"
    print(json.dumps({"session_id": args.session_id, "found": found}) if args.json else f"{args.session_id}: {answer}")
    return exits.OK if found else exits.FAILED
