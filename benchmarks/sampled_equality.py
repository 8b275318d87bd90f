"""Seeded sampled generations through a real node: alone, and again among others; the tokens must be the same.

``python benchmarks/sampled_equality.py [--runtime-dir DIR | --model FILE] [--generations 200] [--tokens 128]
[--at-once 16] [--seed 1] [--json]``

Without ``--runtime-dir`` it starts a node of its own. First every generation runs with nothing beside it, then all
of them in random order, ``--at-once`` at a time, with further generations among them that are cancelled at a random
token. Prints how many are equal token for token; exit code 0 where all are.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from treadle import Client, TextDelta
from treadle.supervise import BackgroundNode, prepare_node

WORDS = ("river", "stone", "lantern", "harbour", "copper", "orchard", "winter", "signal", "mirror", "garden")
DECOY_SHARE = 0.3  # cancelled generations for each that is compared
SAMPLING = {"temperature": 0.9, "top_p": 0.95, "repeat_penalty": 1.1, "ignore_eos": True}


@dataclass(frozen=True, slots=True)
class Generation:
    """One request. ``cancel_at``: it is cancelled once it has so many tokens; None runs it to its end."""

    prompt: str
    seed: int
    tokens: int
    cancel_at: int | None = None


def make_generations(count: int, tokens: int, order: random.Random) -> list[Generation]:
    """Prompts of a few words up to about a hundred."""
    prompts = [" ".join(order.choices(WORDS, k=order.randint(3, 90))) for _ in range(count)]
    return [Generation(f"Write a story about: {prompt}.", seed, tokens) for seed, prompt in enumerate(prompts)]


def make_decoys(generations: list[Generation], order: random.Random) -> list[Generation]:
    """Generations that will be cancelled at a random token."""
    picked = order.sample(generations, int(len(generations) * DECOY_SHARE))
    return [
        Generation(one.prompt[::-1], one.seed + 10_000, one.tokens, order.randint(0, one.tokens - 1)) for one in picked
    ]


def answer(client: Client, generation: Generation) -> list[int]:
    """The tokens of one generation, which runs to its end or is cancelled on the way."""
    session = client.generate(generation.prompt, max_tokens=generation.tokens, seed=generation.seed, **SAMPLING)
    if generation.cancel_at == 0:
        session.cancel()
    for event in session.events():
        limit = generation.cancel_at
        if isinstance(event, TextDelta) and limit is not None and len(session.tokens) >= limit:
            session.cancel()
    return list(session.tokens)


def compare(client: Client, options: argparse.Namespace) -> dict[str, object]:
    """Run everything twice."""
    order = random.Random(options.seed)
    generations = make_generations(options.generations, options.tokens, order)
    started = time.perf_counter()
    alone = [answer(client, generation) for generation in generations]
    alone_s = time.perf_counter() - started
    jobs = generations + make_decoys(generations, order)
    order.shuffle(jobs)
    started = time.perf_counter()
    with ThreadPoolExecutor(options.at_once) as threads:
        found = dict(zip(jobs, threads.map(lambda job: answer(client, job), jobs), strict=True))
    beside_s = time.perf_counter() - started
    beside = [found[generation] for generation in generations]
    equal = [mine == other and len(mine) == options.tokens for mine, other in zip(alone, beside, strict=True)]
    cancelled = [job for job in jobs if job.cancel_at is not None and len(found[job]) < job.tokens]
    return {
        "generations": len(generations),
        "equal": sum(equal),
        "different": [number for number, same in enumerate(equal) if not same],
        "tokens": options.tokens,
        "at_once": options.at_once,
        "cancelled": len(cancelled),
        "distinct": len({tuple(tokens) for tokens in alone}),
        "occupancy_max": client.telemetry()["batch_occupancy_max"],
        "exact": client.model_info()["exact"],
        "alone_s": round(alone_s, 1),
        "beside_s": round(beside_s, 1),
    }


@contextmanager
def node(options: argparse.Namespace) -> Iterator[Path]:
    """The named node's directory, or that of one started here."""
    if options.runtime_dir:
        yield Path(options.runtime_dir)
        return
    settings = {"max_sessions": options.at_once, "session_tokens": 1024, "log_level": "warning"}
    settings |= {"model": options.model} if options.model else {}
    settings |= {"threads": options.threads} if options.threads else {}
    with tempfile.TemporaryDirectory(prefix="treadle-equality-") as folder:
        prepared = prepare_node(str(Path(folder) / "node"), None, settings)
        with BackgroundNode(prepared, sys.stderr.buffer, lambda text: None) as background:
            if background.wait_ready() is None:
                raise SystemExit("the node did not start")
            yield prepared.directory.path


def main() -> int:
    """Compare and print; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runtime-dir", help="a running node's directory; without one a node is started")
    parser.add_argument("--model", help="the GGUF of the node that is started; by default the demo model")
    parser.add_argument("--threads", type=int, help="CPU threads of the node that is started")
    parser.add_argument("--generations", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1, help="of prompts, order and cancellations")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with node(options) as directory, Client(directory) as client:
        found = compare(client, options)
    if options.json:
        print(json.dumps(found))
    else:
        print(f"{found['equal']} of {found['generations']} equal")
        print(", ".join(f"{key} {value}" for key, value in found.items()))
    return 0 if found["equal"] == found["generations"] else 1


if __name__ == "__main__":
    sys.exit(main())
