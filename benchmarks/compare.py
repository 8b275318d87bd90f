"""Compares Treadle with other servers of the same model: ``make bench SUITE=closed [CASE=q4_1-exact] [PAIRS=5]``.

Builds what it compares with, the first time; starts each system in turn, puts the same load on it, and writes a
table and plots. Every finished run is kept: called again, it goes on where it was stopped. A suite takes at most
``--minutes``; what is not done by then is left to the next call.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from comparison.case import parse_case
from comparison.comparison import Comparison, OutOfTime
from comparison.cost_suite import FIGURES as COST_FIGURES
from comparison.cost_suite import measure_cost, setting
from comparison.errors import BenchmarkError
from comparison.figure import Figure
from comparison.llama_server import LlamaServer
from comparison.names import PYTHON, SPLIT, TREADLE, TREADLE_ITL, UNIFIED
from comparison.peers import Peers, build_peers, installed_version
from comparison.plots import plot
from comparison.progress import Progress
from comparison.python_server import PythonServer
from comparison.records import Record, Records
from comparison.report import loads, report
from comparison.runner import Runner
from comparison.schedule import RunKey
from comparison.suites import SUITES, Suite
from comparison.systems import System, environment
from comparison.treadle_system import Treadle, known
from make_quants import cache_folder

from treadle_broker.text.vocab_tokenizer import VocabTokenizer

ITL_GOAL = {"target_itl_ms": 150}
COST = "cost"


def main() -> int:
    """Run a suite; 0 also where time ran out, 1 where something is missing."""
    options = _options()
    progress = Progress()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that what was started is ended
    try:
        if options.suite == COST:
            _cost(options, progress)
        else:
            _compare(options, SUITES[options.suite], progress)
    except BenchmarkError as error:
        progress.say(f"compare: {error}\n")
        return 1
    return 0


def _compare(options: argparse.Namespace, suite: Suite, progress: Progress) -> None:
    case = parse_case(options.case or suite.case)
    records = _records(options, f"{options.suite}-{case.name}", {"case": case.name, "threads": options.threads})
    deadline = time.monotonic() + 60 * options.minutes
    environ = environment()
    peers = build_peers(cache_folder() / "peers", progress.say)
    tokenizer = VocabTokenizer(case.model())
    runner = Runner(
        case=case,
        systems=_systems(peers, sorted(tokenizer.eog), progress),
        tokenize=lambda text: tokenizer.encode(text).tolist(),
        threads=options.threads,
        scratch=records.file.parent,
        environ=environ,
    )
    comparison = Comparison(runner, peers, records, suite.figures, progress, deadline)
    try:
        suite.carry_out(comparison, 1 if options.quick else options.pairs, options.quick)
    except OutOfTime:
        progress.say(f"{options.minutes:g} minutes are over; the same command goes on from here\n")
    _write(records, suite.figures, suite.plotted, f"{options.suite}, {case.name}")


def _cost(options: argparse.Namespace, progress: Progress) -> None:
    records = _records(options, COST, {})
    node = setting(records.file.parent, environment())
    for pair in range(1 if options.quick else options.pairs):
        key = RunKey("node", TREADLE, pair)
        if key not in records.finished:
            progress.say(f"cost, run {pair + 1}")
            records.add(Record(key, measure_cost(node)))
    _write(records, COST_FIGURES, (), COST)


def _write(records: Records, figures: Sequence[Figure], plotted: Sequence[Figure], title: str) -> None:
    """The table, to standard output too, and a plot of each kind of load."""
    text = report(records, figures, title)
    records.file.with_suffix(".md").write_text(text)
    print(text)
    if plotted and (names := loads(records.records)):
        plot(records, names, plotted, title, records.file.with_suffix(".svg"))


def _systems(peers: Peers, eog: Sequence[int], progress: Progress) -> dict[str, System]:
    return {
        TREADLE: Treadle(TREADLE),
        TREADLE_ITL: Treadle(TREADLE_ITL, options=known(ITL_GOAL)),
        SPLIT: LlamaServer(peers, unified=False),
        UNIFIED: LlamaServer(peers, unified=True),
        PYTHON: PythonServer(peers, cache_folder() / "peers" / "python-server", eog, progress.say),
    }


def _records(options: argparse.Namespace, name: str, facts: Mapping[str, Any]) -> Records:
    """The results so far, of the same code and circumstances."""
    same = {"llama-cpp-python": installed_version(), "treadle": _revision(), "cpus": len(os.sched_getaffinity(0))}
    return Records(options.out / f"{name}{'-quick' if options.quick else ''}.jsonl", {**facts, **same})


def _revision() -> str:
    """Which Treadle this is."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    about = "; ".join(f"{name}: {suite.about} ({suite.case})" for name, suite in SUITES.items())
    parser.add_argument("--suite", required=True, choices=(*SUITES, COST), help=f"{about}; {COST}: broker and client")
    parser.add_argument("--case", metavar="QUANT-NUMERICS", help="such as q4_1-exact (default: the suite's own)")
    parser.add_argument("--pairs", type=int, default=5, help="runs of each paired system (default: 5)")
    parser.add_argument("--quick", action="store_true", help="one pair, at fewer levels; kept apart from the others")
    parser.add_argument("--minutes", type=float, default=38.0, help="begin no run after these (default: 38)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of every engine")
    parser.add_argument("--out", type=Path, default=Path(".bench"), help="folder of the results (default: .bench)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
