"""What exact numerics cost against fast ones: the same rows on both sides, in alternation.

``python benchmarks/exact_cost.py MODEL… [--pairs 5] [--threads N] [--long-prefill 1,8,32] [--json]``

Each side of a pair runs in a process of its own, because llama.cpp reads its kernel switches once a process. A side
measures seconds inside ``llama_decode``:

- prefill of prompts of 64 tokens for 1, 8 and 32 sessions in one call of the engine, and of 1,000 tokens for the
  sessions that ``--long-prefill`` names (1 by default: one such prompt fills every call, so more of them only take
  longer);
- decode ticks of 1, 8 and 32 sessions that hold 64 and 1,000 tokens each.

Within a process the best of several ticks counts: other load on the machine only ever adds time. The table has the
medians of both sides in tokens a second, the median of the pairs' ratios exact / fast, and the least and largest ratio.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from make_quants import demo_model

from treadle_shared.config import NodeConfig, make_config
from treadle_worker.llama.batch import calls_alone, calls_packed
from treadle_worker.llama.context import LlamaContext
from treadle_worker.llama.library import load_library
from treadle_worker.llama.model import LlamaModel
from treadle_worker.llama.switches import choose_switches
from treadle_worker.pinning import usable_cpus

SIDES = ("exact", "fast")
SESSIONS = (1, 8, 32)
SHORT, LONG = 64, 1000
TICKS = 7  # decode ticks; the first runs what copying left to do, and does not count
PREFILLS = {1: 5, 8: 2}  # how often a number of sessions prefills short prompts; once where it is not named
TIMEOUT_S = 900.0  # one side on a slow machine


class Bench:
    """One side, in this process."""

    def __init__(self, config: NodeConfig) -> None:
        model = LlamaModel(load_library(), config, choose_switches, lambda fraction: None)
        self._context = LlamaContext(model, config, config.threads or 1)
        random = np.random.default_rng(1)
        self._tokens = random.integers(0, model.n_vocab, (config.max_sessions, LONG + TICKS)).astype(np.int32)

    def measure(self, long_prefill: Sequence[int]) -> dict[str, float]:
        """Tokens a second by name of the cell."""
        self._prefill(1, SHORT)  # the first computation makes buffers and starts threads
        found = {}
        for sessions in SESSIONS:
            spent = [self._prefill(sessions, SHORT) for _ in range(PREFILLS.get(sessions, 1))]
            found[f"prefill {SHORT} x {sessions}"] = sessions * SHORT / min(spent)
        for sessions in long_prefill:
            found[f"prefill {LONG} x {sessions}"] = sessions * LONG / self._prefill(sessions, LONG)
        for held in (SHORT, LONG):
            self._prefill(1, held)
            for sessions in SESSIONS:
                found[f"decode at {held} x {sessions}"] = sessions / self._decode(sessions, held)
        return found

    def _prefill(self, sessions: int, length: int) -> float:
        context, lengths = self._context, [length] * sessions
        context.forget_all()
        calls = (
            calls_alone(lengths, context.n_ubatch, 2)
            if context.model.keeps_roles
            else calls_packed(lengths, context.n_batch)
        )
        spent = 0.0
        for call in calls:
            end, outputs = 0, 0
            for piece in call:
                tokens = self._tokens[piece.item, piece.offset : piece.offset + piece.size]
                end = context.fill(piece.item, piece.offset, tokens, end)
                context.batch.output[end - 1] = piece.last
                outputs += piece.last
            started = time.perf_counter()
            context.run(end, outputs)
            spent += time.perf_counter() - started
        return spent

    def _decode(self, sessions: int, held: int) -> float:
        """Seconds of the best tick; every session holds a copy of the prompt in slot 0."""
        context = self._context
        context.trim(0, held)
        for slot in range(1, sessions):
            context.forget(slot)
            context.copy_prefix(0, slot, held)
        ticks = []
        for number in range(TICKS):
            for slot in range(sessions):
                context.fill(slot, held + number, self._tokens[slot, held + number : held + number + 1], slot)
            context.batch.output[:sessions] = 1
            started = time.perf_counter()
            context.run(sessions, sessions)
            ticks.append(time.perf_counter() - started)
        return min(ticks[1:])


def run_side(side: str, model: Path, threads: int, long_prefill: Sequence[int]) -> dict[str, float]:
    """One side in a process of its own."""
    command = [sys.executable, __file__, str(model), "--side", side, "--threads", str(threads)]
    command += ["--long-prefill", ",".join(map(str, long_prefill))]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=TIMEOUT_S)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def compare(model: Path, pairs: int, threads: int, long_prefill: Sequence[int]) -> dict[str, dict[str, float]]:
    """Every cell's medians and the spread of its ratio over the pairs."""
    found: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for pair in range(pairs):
        for side in SIDES if pair % 2 == 0 else reversed(SIDES):
            found[side].append(run_side(side, model, threads, long_prefill))
        print(f"{model.name}: pair {pair + 1} of {pairs}", file=sys.stderr, flush=True)
    return {cell: summary(cell, found) for cell in found["exact"][0]}


def summary(cell: str, found: dict[str, list[dict[str, float]]]) -> dict[str, float]:
    """One cell over all pairs."""
    exact, fast = ([run[cell] for run in found[side]] for side in SIDES)
    ratios = [mine / other for mine, other in zip(exact, fast, strict=True)]
    return {
        "exact": round(statistics.median(exact), 1),
        "fast": round(statistics.median(fast), 1),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_min": round(min(ratios), 3),
        "ratio_max": round(max(ratios), 3),
    }


def table(model: Path, cells: dict[str, dict[str, float]]) -> str:
    """For people."""
    lines = [model.name, f"{'tokens x sessions':24}{'exact tok/s':>12}{'fast tok/s':>12}{'ratio':>8}  least .. largest"]
    for cell, found in cells.items():
        spread = f"{found['ratio_min']:.2f} .. {found['ratio_max']:.2f}"
        lines.append(f"{cell:24}{found['exact']:12.1f}{found['fast']:12.1f}{found['ratio']:8.2f}  {spread}")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", type=Path, metavar="MODEL", help="GGUFs; by default the demo model")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(usable_cpus()))
    parser.add_argument("--long-prefill", default="1", metavar="N,N,…", help="sessions that prefill 1,000 tokens")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    long_prefill = [int(part) for part in options.long_prefill.split(",")]
    models = options.models or [demo_model()]
    if options.side:
        settings = {"model": str(models[0]), "numerics": options.side, "threads": options.threads}
        size = {"max_sessions": max(SESSIONS), "session_tokens": LONG + TICKS}
        print(json.dumps(Bench(make_config(settings | size)).measure(long_prefill)))
        return
    found = {model: compare(model, options.pairs, options.threads, long_prefill) for model in models}
    if options.json:
        print(json.dumps({model.name: cells for model, cells in found.items()}))
        return
    print("\n\n".join(table(model, cells) for model, cells in found.items()))


if __name__ == "__main__":
    main()
