"""``treadle replay FILE``: exit code 0 where a tick log's decisions come out as recorded, 1 where some would differ."""

from __future__ import annotations

import argparse
import subprocess
import sys
from typing import Final

from treadle.cli import exits

_MODULE: Final = "treadle_broker.replay"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("file", metavar="FILE", help="a tick log (the node's setting tick_log), or its FILE.1")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")


def run(args: argparse.Namespace) -> int:
    """Run the replay in a process of its own: the scheduler is the broker's."""
    command = [sys.executable, "-m", _MODULE, *(["--json"] if args.json else []), "--", args.file]
    code = subprocess.run(command).returncode  # noqa: S603  (this interpreter, our own module)
    if code < 0:
        print(f"treadle: the replay was ended by signal {-code}", file=sys.stderr)
        return exits.SOFTWARE
    return code
