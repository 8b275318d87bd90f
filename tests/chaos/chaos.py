"""Chaos: a real node under load and under faults, with the right answers beside it.

``python tests/chaos/chaos.py [--seconds 600] [--seed 1] [--engine reference|llama] [--pause 2.0]``

A supervised node serves clients that know the right answer to every question. At random moments one of the faults of
``chaos_faults`` strikes. At the end: every finished text equals its undisturbed one, every cut one is a prefix of it,
nothing accepted was lost, and the node holds no KV, slot, session or descriptor more than before. Prints a line for
each fault and a JSON summary; exit code 0 only without a violation. The seed fixes the faults' order and the load's
choices, not the moments at which the machine runs them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "integration")]

from chaos_faults import FAULTS, Target
from chaos_load import Load, Question, Tally, make_questions
from real_node import wait_for
from served_node import ServedNode

QUESTIONS = 24
CLIENTS = 6
NODE_FLAGS = (
    "--max-sessions", "4", "--queue-depth", "16", "--session-tokens", "1024", "--tick-timeout-s", "5",
    "--orphan-timeout-s", "2", "--result-ttl-s", "5", "--log-format", "json", "--faults", "kill@token=7",
)  # fmt: skip
TURNS_FLAGS = ("--kv-policy", "optimistic", "--slots", "2", "--slice-tokens", "8")
SPARE_DESCRIPTORS = 6  # sockets that zmq closes a moment later


def main() -> int:
    """Run; the exit code."""
    options = _options()
    random_ = random.Random(options.seed)
    with tempfile.TemporaryDirectory(prefix="treadle-chaos-") as folder:
        flags = [*NODE_FLAGS, "--engine", options.engine, *(TURNS_FLAGS if options.turns else ())]
        node = ServedNode(Path(folder) / "node", *flags).wait_ready()
        try:
            summary = _run(node, random_, options)
        finally:
            node.process.terminate()
            code = node.process.wait(60)
    summary["violations"] += [] if code == 0 else [f"the node ended with {code}"]
    print(json.dumps(summary, indent=1))
    return 1 if summary["violations"] else 0


def _run(node: ServedNode, random_: random.Random, options: argparse.Namespace) -> dict[str, Any]:
    questions = make_questions(random_, QUESTIONS, options.longest)
    answers = _quiet_answers(node, questions)
    descriptors = _descriptors(node)
    load = Load(str(node.path), questions, answers, CLIENTS, options.seed)
    target = Target(node, random_, load.tally)
    load.start()
    faults = _storm(target, options.seconds, options.pause)
    load.stop()
    _check_idle(node, load.tally, descriptors)
    finished = sum(load.tally.outcomes[reason] for reason in ("length", "cancelled", "deadline"))
    return {
        "seed": options.seed,
        "faults": dict(faults),
        "faults_total": sum(faults.values()),
        "finished_sessions": finished,
        "outcomes": dict(load.tally.outcomes),
        "parks": node.status()["telemetry"]["parks_total"],
        "violations": load.tally.violations,
    }


def _quiet_answers(node: ServedNode, questions: list[Question]) -> list[list[int]]:
    with node.client() as client:
        answers = []
        for question in questions:
            session = question.ask(client)
            session.result()
            answers.append(session.tokens)
        return answers


def _storm(target: Target, seconds: float, pause: float) -> Counter[str]:
    """Every kind of fault once in a drawn order, then again, until the time is over."""
    counts: Counter[str] = Counter()
    deadline = time.monotonic() + seconds
    order: list[Any] = []
    while time.monotonic() < deadline:
        if not order:
            order = random.Random(target.random.random()).sample(FAULTS, len(FAULTS))
        fault = order.pop()
        time.sleep(target.random.uniform(0, 2 * pause))
        began = time.monotonic()
        fault(target)
        counts[fault.__name__] += 1
        wait_for(lambda: target.node.status()["ready"], f"ready again after {fault.__name__}", 60)
        print(f"{fault.__name__}: ready after {time.monotonic() - began:.2f} s", flush=True)
    return counts


def _check_idle(node: ServedNode, tally: Tally, descriptors: int) -> None:
    """After the storm the node holds nothing."""

    def held() -> dict[str, Any]:
        facts = node.status()
        if not facts["ready"]:
            return {"ready": False}
        seen = facts["telemetry"]
        settled = sum(seen[f"{name}_total"] for name in ("done", "failed", "cancelled", "rejected"))
        return {
            "kv_bytes": seen["kv_bytes"],
            "parked": seen["parked_bytes"] + seen["parked_sessions"],
            "active_sessions": seen["active_sessions"],
            "queue_depth": seen["queue_depth"],
            "kv_drift_rows": facts["kv_drift_rows"],
            "unbalanced": seen["submitted_total"] - seen["queue_depth"] - seen["active_sessions"] - settled,
        }

    try:
        wait_for(lambda: not any(held().values()), "an idle node holds nothing", 30)
        wait_for(lambda: _descriptors(node) <= descriptors + SPARE_DESCRIPTORS, "descriptors are back", 40)
    except AssertionError as failed:
        tally.violate(f"{failed}: {held()}, {_descriptors(node)} descriptors, {descriptors} at first")


def _descriptors(node: ServedNode) -> int:
    """Open files and sockets of the broker."""
    return len(os.listdir(f"/proc/{node.status()['pids']['broker']}/fd"))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="how long faults strike (600)")
    parser.add_argument("--seed", type=int, default=1, help="of faults and load (1)")
    parser.add_argument("--engine", choices=("reference", "llama"), default="reference")
    parser.add_argument("--pause", type=float, default=2.0, help="mean seconds between two faults (2.0)")
    parser.add_argument("--turns", action="store_true", help="the optimistic policy, with fewer slots than sessions")
    parser.add_argument("--longest", type=int, default=300, help="most tokens of an answer (300)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
