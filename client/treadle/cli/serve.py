"""``treadle serve``: a node in the foreground, its processes restarted when they die."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path
from typing import Any

from treadle.cli.node_flags import add_node_flags, flags_of
from treadle.cli.progress import Progress
from treadle.supervise import PreparedNode, Supervisor, prepare_node


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--config", metavar="FILE", help="a TOML file of settings")
    parser.add_argument("--json", action="store_true", help="print the ready line as one JSON object")
    add_node_flags(parser, "its TREADLE_* variable and over --config")


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM, SIGINT or SIGHUP; 0 after a clean drain, 78 where the configuration cannot work."""
    node = prepare_node(args.runtime_dir, args.config, flags_of(args))
    try:
        return _serve(node, args.json)
    finally:
        node.release()


def _serve(node: PreparedNode, as_json: bool) -> int:
    progress = Progress(sys.stderr)

    def ready(facts: dict[str, Any]) -> None:
        progress.clear()
        print(json.dumps(ready_facts(node, facts)) if as_json else ready_line(node, facts), flush=True)

    supervisor = Supervisor(node.directory, node.config.drain_timeout_s, progress.say, ready, progress.show)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup asks for that
            signal.signal(number, lambda got, frame: supervisor.request_stop(got))
    code = supervisor.run()
    progress.clear()
    return code


def ready_line(node: PreparedNode, facts: dict[str, Any]) -> str:
    """The one line on standard output."""
    known = ready_facts(node, facts)
    exact = "yes" if known["exact"] else "no"
    return f"ready: {known['model']} exact={exact} sessions={known['sessions']} runtime-dir={known['runtime_dir']}"


def ready_facts(node: PreparedNode, facts: dict[str, Any]) -> dict[str, Any]:
    """What a node that is ready says of itself."""
    named = facts.get("model") or node.config.model or node.config.engine
    return {
        "ready": True,
        "model": Path(str(named)).name,
        "exact": bool(facts.get("exact")),
        "sessions": node.config.max_sessions,
        "runtime_dir": str(node.directory.path),
    }
