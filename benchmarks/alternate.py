"""Sets systems side by side that run all the time: ``make alternate LOAD="closed 1" [CASE=q4_k_m-fast] [ROUNDS=10]
[SYSTEMS="split treadle treadle,coalesce_ms=0"]``.

Each round puts the same load on every system, one after the other, and the order moves on by one from round to round.
Two runs of one ratio are seconds apart and not minutes, as in ``make bench``: a machine that is faster in the morning
counts for both. Systems that wait take memory and no processor. The first named system is what the others are held
against: ``split`` or ``unified`` (llama-server), or ``treadle`` with settings of a node behind it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

from comparison import closed_suite
from comparison.case import parse_case
from comparison.errors import BenchmarkError
from comparison.llama_server import LlamaServer
from comparison.measures import measured
from comparison.peers import build_peers
from comparison.progress import Progress
from comparison.prompts import Prompts
from comparison.ratios import Range
from comparison.runner import SEED, Runner
from comparison.systems import Running, System, environment
from comparison.trace import Trace
from comparison.treadle_system import Treadle
from make_quants import cache_folder

from treadle_broker.text.vocab_tokenizer import VocabTokenizer

LOADS: Final = {
    experiment.load: experiment for experiment in (*closed_suite.closed(False), *closed_suite.staggered(False))
}
_TIMES: Final = ("ttft_ms_p50", "itl_ms_p50", "itl_ms_p99", "itl_ms_max")


def main() -> int:
    """Run the rounds and print a table; 1 where something is missing."""
    options = _options()
    progress = Progress()
    try:
        rounds = asyncio.run(_rounds(options, progress))
    except BenchmarkError as error:
        progress.say(f"alternate: {error}\n")
        return 1
    print(_table(f"{options.load}, {options.case}", rounds, options.systems[0]))
    return 0


async def _rounds(options: argparse.Namespace, progress: Progress) -> dict[str, list[list[Trace]]]:
    """What came of each round, by system."""
    experiment, case, environ = LOADS[options.load], parse_case(options.case), environment()
    tokenizer = VocabTokenizer(case.model())
    threads = len(os.sched_getaffinity(0))
    found: dict[str, list[list[Trace]]] = defaultdict(list)
    systems = {name: _system(name, progress) for name in options.systems}
    if len(systems) < len(options.systems):
        raise BenchmarkError("a system is named twice")

    def tokenize(text: str) -> list[int]:
        return tokenizer.encode(text).tolist()

    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="treadle-alternate-")))
        running: dict[str, Running] = {}
        for number, (name, system) in enumerate(systems.items()):
            (scratch := folder / str(number)).mkdir()
            runner = Runner(case, systems, tokenize, threads, scratch, environ)
            running[name] = await stack.enter_async_context(system.run(runner.setting(experiment)))
        for number in range(-1, options.rounds):  # one before the first, to warm up
            progress.say(f"{options.load}, round {number + 1} of {options.rounds}")
            names = options.systems[number % len(running) :] + options.systems[: number % len(running)]
            for name in names:
                traces = await experiment.drive(running[name].ask, Prompts(tokenize, SEED + number))
                if number >= 0:
                    found[name].append(traces)
    return found


def _system(name: str, progress: Progress) -> System:
    kind, *settings = name.split(",")
    if kind in ("split", "unified"):
        return LlamaServer(build_peers(cache_folder() / "peers", progress.say), unified=kind == "unified")
    if kind != "treadle" or not all("=" in setting for setting in settings):
        raise BenchmarkError(f"{name}: a system is split, unified or treadle[,key=value]...")
    return Treadle(options=dict(setting.split("=", 1) for setting in settings))


def _table(title: str, rounds: dict[str, list[list[Trace]]], first: str) -> str:
    """Medians of the rounds, with the least and the greatest; latencies of all rounds together."""
    lines = [
        f"# {title}: {len(rounds[first])} rounds",
        "",
        f"| system | generated tok/s | to {first} | TTFT p50, ms | ITL p50, ms | ITL p99, ms | ITL max, ms |",
        "|---|---|---|---|---|---|---|",
    ]
    rates = {name: [measured(traces)["tokens_per_s"] for traces in found] for name, found in rounds.items()}
    for name, found in rounds.items():
        ratios = [mine / theirs for mine, theirs in zip(rates[name], rates[first], strict=True)]
        together = measured([trace for traces in found for trace in traces])
        times = [f"{together[figure] or 0:.1f}" for figure in _TIMES]
        lines.append("| " + " | ".join([name, _text(rates[name], 1), _text(ratios, 3), *times]) + " |")
    return "\n".join(lines)


def _text(values: Sequence[float], digits: int) -> str:
    found = Range.of(values)
    return found.text(digits) if found else "-"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", required=True, choices=LOADS, help="one level of a suite of closed loops")
    parser.add_argument("--case", default="q4_k_m-fast", metavar="QUANT-NUMERICS", help="(default: q4_k_m-fast)")
    parser.add_argument("--rounds", type=int, default=10, help="how often each system runs (default: 10)")
    parser.add_argument("systems", nargs="+", metavar="SYSTEM", help="split, unified or treadle[,key=value]...")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
