"""Turns against waiting: ``python benchmarks/parking.py [--model FILE | --engine reference]``.

First what moving a sequence out to host memory and in again costs beside computing it anew, by its length. Then the
same jobs, in alternation under ``optimistic``, where all of them are active and take turns in the slots, and under
``reserve``, where those beyond the slots wait in the queue. Prints parks, times to the first token, the longest pause
of each session, and generated tokens a second. Exit code 1 where an answer differs.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from make_quants import demo_model

from treadle_broker import ContinuousBatchScheduler
from treadle_broker.node_facts import derive_budget
from treadle_shared.config import NodeConfig, make_config
from treadle_shared.engine import BatchEngine, DecodeItem, ParkingEngine, PrefillItem
from treadle_shared.request import GenerationRequest
from treadle_shared.sampling import SamplingParams
from treadle_worker.engines import make_engine
from treadle_worker.pinning import usable_cpus

LENGTHS = (32, 128, 256, 512)
PARAMS = SamplingParams(seed=1, ignore_eos=True)
REPEATS = 3  # moves of each length: other load only ever adds time, so the best counts
ROWS = 4  # timed decode rows: what replaying one emitted token takes


@dataclass(frozen=True, slots=True)
class Run:
    """One policy over all jobs: tokens by session, parks, and times in seconds."""

    answers: dict[str, list[int]]
    parks: int
    dropped: int
    wall_s: float
    first_s: list[float]
    pauses_s: list[float]

    @property
    def rate(self) -> float:
        """Generated tokens a second."""
        return sum(map(len, self.answers.values())) / self.wall_s


def main() -> None:
    """Measure and print."""
    options = _parser().parse_args()
    policies = {
        "optimistic": _config(options, max_sessions=options.sessions, slots=options.slots, kv_policy="optimistic"),
        "reserve": _config(options, max_sessions=options.slots),
    }
    engine = make_engine(policies["optimistic"])
    print_moves(engine)
    jobs = _jobs(engine, options)
    print(f"\n{options.sessions} sessions of {options.prompt} + {options.new} tokens in {options.slots} slots,")
    print(f"slices of {options.slice_tokens} tokens; seconds\n")
    print("policy       parks anew  tok/s   first token p50   max   longest pauses, by session")
    runs: dict[str, list[Run]] = {name: [] for name in policies}
    for _ in range(options.rounds):
        for name, config in policies.items():
            runs[name].append(run(engine, config, jobs))
            print_run(name, runs[name][-1])
    ratios = [mine.rate / theirs.rate for mine, theirs in zip(*runs.values(), strict=True)]
    longest = max(pause for one in runs["optimistic"] for pause in one.pauses_s)
    answers = [one.answers for every in runs.values() for one in every]
    same = all(one == answers[0] for one in answers)
    print(f"\ntokens/s optimistic / reserve: {median(ratios):.3f} ({min(ratios):.3f} .. {max(ratios):.3f})")
    print(f"longest pause under optimistic: {longest:.2f} s; answers {'equal' if same else 'DIFFER'}")
    sys.exit(0 if same else 1)


def run(engine: BatchEngine, config: NodeConfig, jobs: list[GenerationRequest]) -> Run:
    """All jobs at once."""
    scheduler = ContinuousBatchScheduler(engine, derive_budget(config, engine.facts), depth=2)
    started = time.monotonic()
    decisions = scheduler.submit_many(jobs)
    assert all(decision.accepted for decision in decisions)
    outputs = scheduler.run_to_completion()
    wall = time.monotonic() - started
    scheduler.check()
    seen = scheduler.telemetry()
    return Run(
        {name: one.tokens for name, one in outputs.items()},
        seen.parks_total,
        seen.park_drops_total,
        wall,
        sorted(one.token_times[0] - started for one in outputs.values()),
        [max(later - earlier for earlier, later in pairwise(one.token_times)) for one in outputs.values()],
    )


def print_run(name: str, one: Run) -> None:
    """A line of the table."""
    pauses = " ".join(f"{pause:.2f}" for pause in one.pauses_s)
    first = f"{median(one.first_s):15.2f} {one.first_s[-1]:7.2f}"
    print(f"{name:12} {one.parks:5} {one.dropped:4} {one.rate:6.1f} {first}   {pauses}")


def print_moves(engine: BatchEngine) -> None:
    """What a sequence of each length costs to move and to compute anew, in milliseconds."""
    assert isinstance(engine, ParkingEngine)
    rows = engine.facts.max_sequences
    print("tokens       MB     out      in   moved   prefilled   replayed in decode rows (ms)")
    for length in (one for one in LENGTHS if one + ROWS < engine.facts.context_tokens):
        tokens = np.random.default_rng(length).integers(20, engine.facts.n_vocab - 10, length).tolist()
        prefill_ms = _ms(lambda tokens=tokens: engine.prefill([PrefillItem(0, 0, 0, tokens, True, 0, PARAMS)]))
        moves = [_move(engine, number) for number in range(REPEATS)]
        out_ms, in_ms, size = min(moves)
        row_ms = min(_ms(lambda at=at: engine.decode_batch([DecodeItem(0, REPEATS, at)])) for at in _after(length))
        engine.release(0, REPEATS)
        replay = f"{length * row_ms:9.0f} alone"
        print(
            f"{length:6} {size / 1e6:8.2f} {out_ms:7.2f} {in_ms:7.2f} {out_ms + in_ms:7.2f} {prefill_ms:11.1f} {replay}"
        )
    share = 1000 * engine.facts.decode_tick_s / rows
    print(
        f"by the engine's own measure: {1000 / (engine.facts.park_tokens_per_s or float('inf')):.4f} ms a token moved,"
    )
    print(f"{1000 / engine.facts.prefill_tokens_per_s:.2f} prefilled, {share:.2f} replayed beside {rows - 1} others")


def _after(length: int) -> range:
    return range(length, length + ROWS)


def _move(engine: ParkingEngine, number: int) -> tuple[float, float, int]:
    """Milliseconds out and in, and bytes; generation ``number`` becomes the next one."""
    out_ms = _ms(lambda: engine.park(0, number))
    size = engine.parked_bytes
    return out_ms, _ms(lambda: engine.restore(0, number, 0, number + 1)), size


def _ms(call: Any) -> float:
    started = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - started)


def _jobs(engine: BatchEngine, options: argparse.Namespace) -> list[GenerationRequest]:
    draw = np.random.default_rng(1)
    return [
        GenerationRequest(
            session_id=f"s{number}",
            prompt_tokens=draw.integers(20, engine.facts.n_vocab - 10, options.prompt).tolist(),
            max_new_tokens=options.new,
            params=PARAMS,
        )
        for number in range(options.sessions)
    ]


def _config(options: argparse.Namespace, **settings: Any) -> NodeConfig:
    model = {} if options.engine == "reference" else {"model": str(options.model or demo_model())}
    size = {"session_tokens": max(1024, options.prompt + options.new), "threads": options.threads}
    turns = {"slice_tokens": options.slice_tokens}
    return make_config({"engine": options.engine, **model, **size, **turns, **settings})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a GGUF; by default the demo model")
    parser.add_argument("--engine", choices=("llama", "reference"), default="llama")
    parser.add_argument("--threads", type=int, default=len(usable_cpus()))
    parser.add_argument("--sessions", type=int, default=16)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=100, metavar="TOKENS")
    parser.add_argument("--new", type=int, default=128, metavar="TOKENS")
    parser.add_argument("--slice-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    return parser


if __name__ == "__main__":
    main()
