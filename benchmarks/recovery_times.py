"""What faults cost: ``python benchmarks/recovery_times.py [--engine reference|llama] [--only NAME …]``.

Eight sessions of one node, and one fault after another. Every text is held against the one of a quiet node.

- ``kills``: the worker is killed five times while streams run (400 tokens each); seconds from each kill to the
  ``recovering`` event and to the next new token
- ``freeze``: the worker is stopped (SIGSTOP); seconds until the node says not ready, until another worker serves, and
  until the next token
- ``broker``: the broker is killed under eight resuming clients; seconds until a client without ``resume`` gets
  Unavailable, until the node is ready again, and until the next token
- ``poison``: a request that kills its worker each time it runs, among seven others; seconds until it alone has failed

Prints a line a figure and a JSON summary; exit code 0 only where every promise is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / "integration")]

from real_node import wait_for
from served_node import ServedNode

from treadle import Recovering, Session, SessionFailed, Unavailable

SESSIONS = 8
KILLS = 5
POISON = "\x07"  # as one token of the byte vocabulary, and one that no other prompt here holds
OPTIONS: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True, "temperature": 0.8, "seed": 11}
PROMPTS = [f"stream number {number}, told slowly:" for number in range(SESSIONS)]
FLAGS = ("--max-sessions", "8", "--session-tokens", "1024", "--log-format", "json", "--tick-timeout-s", "5")
PATIENCE_S = 900.0  # a busy machine replays hundreds of tokens in exact numerics, one at a time
SILENCE_S = 3.0  # a worker is given up after this long without a word
NOT_READY_S = SILENCE_S + 3.0  # DESIGN: not ready within 3 s of the limit
UNAVAILABLE_S = 1.0


@dataclass(slots=True)
class Report:
    """Figures as they come, and promises that were not kept."""

    figures: dict[str, list[float]] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)

    def tell(self, name: str, seconds: float, limit: float | None = None) -> None:
        """One figure; beyond its limit it is a broken promise."""
        self.figures.setdefault(name, []).append(round(seconds, 3))
        print(f"{name}: {seconds:.3f} s" + (f" (at most {limit:g})" if limit else ""), flush=True)
        if limit is not None and seconds > limit:
            self.broken.append(f"{name}: {seconds:.3f} s, at most {limit:g}")

    def promise(self, kept: bool, what: str) -> None:
        """Something that must be so."""
        print(f"{what}: {'yes' if kept else 'NO'}", flush=True)
        if not kept:
            self.broken.append(what)


@dataclass(frozen=True, slots=True)
class Bench:
    """How nodes are started, and what the quiet one answered."""

    flags: tuple[str, ...]
    seed: int
    report: Report
    options: dict[str, Any]
    quiet: list[str] = field(default_factory=list)

    @contextmanager
    def node(self, *flags: str) -> Iterator[ServedNode]:
        """A supervised node of its own; it must end well."""
        with tempfile.TemporaryDirectory(prefix="treadle-recovery-") as folder:
            node = ServedNode(Path(folder) / "node", *self.flags, *flags)
            try:
                yield node.wait_ready()
            finally:
                code = node.stop()
                if code != 0:
                    self.report.broken.append(f"the node ended with {code}")

    def whole(self, sessions: list[Session]) -> bool:
        """Whether all texts are those of the quiet node."""
        return [session.result(PATIENCE_S) for session in sessions] == self.quiet[: len(sessions)]


def kills(bench: Bench) -> None:
    """Five times kill -9 of the worker, at random tokens."""
    report, order = bench.report, random.Random(bench.seed)
    moments = sorted(order.sample(range(10, bench.options["max_tokens"] - 40), KILLS))
    with bench.node() as node, node.client() as client:
        sessions = [client.generate(prompt, **bench.options) for prompt in PROMPTS]
        for moment in moments:
            _await_tokens(sessions[:1], moment)
            worker = node.pids()["worker"]
            marks = [len(_so_far(session)) for session in sessions]
            killed = _kill(worker, signal.SIGKILL)
            _follow(report, sessions, marks, killed)
        report.promise(bench.whole(sessions), f"{SESSIONS} texts killed {KILLS} times are the quiet ones")
        report.promise(client.telemetry()["failed_total"] == 0, "nobody was poisoned")


def freeze(bench: Bench) -> None:
    """SIGSTOP on the worker with eight in flight."""
    report = bench.report
    with bench.node() as node, node.client() as client:
        sessions = [client.generate(prompt, **bench.options) for prompt in PROMPTS]
        _await_tokens(sessions, 20)
        worker = node.pids()["worker"]
        stopped = _kill(worker, signal.SIGSTOP)
        wait_for(lambda: not client.status()["ready"], "not ready", PATIENCE_S)
        report.tell("freeze to not ready", time.monotonic() - stopped, NOT_READY_S)
        wait_for(lambda: node.ready_without("worker", worker), "another worker serves", PATIENCE_S)
        report.tell("freeze to replacement", time.monotonic() - stopped)
        had = [len(session.tokens) for session in sessions]
        wait_for(lambda: _news(sessions, had), "the next token", PATIENCE_S)
        report.tell("freeze to next token", time.monotonic() - stopped)
        report.promise(bench.whole(sessions), f"{SESSIONS} texts across a frozen worker are the quiet ones")


def broker(bench: Bench) -> None:
    """kill -9 on the broker with eight resuming clients, and one that does not resume."""
    report = bench.report
    with bench.node() as node, ExitStack() as stack:
        clients = [stack.enter_context(node.client(resume=True)) for _ in PROMPTS]
        sessions = [client.generate(prompt, **bench.options) for client, prompt in zip(clients, PROMPTS, strict=True)]
        _await_tokens(sessions, 20)
        plain = stack.enter_context(node.client()).generate("a client without resume", **bench.options)
        pids = node.pids()
        killed = _kill(pids["broker"], signal.SIGKILL)
        try:
            plain.wait(PATIENCE_S)
            report.promise(False, "a client without resume gets Unavailable")
        except Unavailable:
            report.tell("broker's death to Unavailable", time.monotonic() - killed, UNAVAILABLE_S)
        had = [len(session.tokens) for session in sessions]
        wait_for(lambda: _news(sessions, had), "the next token", PATIENCE_S)
        report.tell("broker's death to next token", time.monotonic() - killed)
        facts = wait_for(lambda: node.ready_without("broker", pids["broker"]), "ready again", PATIENCE_S)
        report.promise(facts["pids"]["worker"] == pids["worker"], "the worker kept its model")
        report.promise(bench.whole(sessions), f"{SESSIONS} resumed texts are the quiet ones")


def poison(bench: Bench) -> None:
    """A request that kills its worker, among seven others."""
    report = bench.report
    token = _poison_token(bench)
    with bench.node("--faults", f"kill@token={token}") as node, node.client() as client:
        sessions = [client.generate(prompt, **bench.options) for prompt in PROMPTS[:-1]]
        _await_tokens(sessions, 5)
        began = time.monotonic()
        try:
            client.generate([token, token, token], **bench.options).result(PATIENCE_S)
            report.promise(False, "a request that kills its worker fails")
        except SessionFailed as failed:
            report.tell("poison to FAILED", time.monotonic() - began)
            report.promise("poison" in str(failed), "it fails as poison")
        report.promise(bench.whole(sessions), f"the {SESSIONS - 1} others are the quiet ones")
        telemetry = client.telemetry()
        report.promise((telemetry["failed_total"], telemetry["done_total"]) == (1, SESSIONS - 1), "it fails alone")


SCENES: dict[str, Callable[[Bench], None]] = {"kills": kills, "freeze": freeze, "broker": broker, "poison": poison}


def _quiet(bench: Bench) -> None:
    with bench.node() as node, node.client() as client:
        bench.quiet.extend(session.result() for session in [client.generate(text, **bench.options) for text in PROMPTS])


def _poison_token(bench: Bench) -> int:
    """The last token of the vocabulary of the poison's byte; prompts of the others do not begin with it."""
    with bench.node() as node, node.client() as client:
        return client.tokenize(POISON)[-1]


def _follow(report: Report, sessions: list[Session], marks: list[int], killed: float) -> None:
    """Seconds from a kill to the first ``recovering`` event and to the first token that follows it."""

    def recovering() -> bool:
        news = (event for session, mark in zip(sessions, marks, strict=True) for event in _so_far(session)[mark:])
        return any(isinstance(event, Recovering) for event in news)

    wait_for(recovering, "recovering", PATIENCE_S)
    report.tell("kill to recovering", time.monotonic() - killed)
    had = [len(session.tokens) for session in sessions]
    wait_for(lambda: _news(sessions, had), "the next token", PATIENCE_S)
    report.tell("kill to next token", time.monotonic() - killed)


def _so_far(session: Session) -> list[Any]:
    """What a session has told, without waiting and without leaving it."""
    return session._stream.events


def _news(sessions: list[Session], had: list[int]) -> bool:
    """Whether some session went on, or all are over."""
    went_on = any(len(session.tokens) > count for session, count in zip(sessions, had, strict=True))
    return went_on or all(session.finish_reason for session in sessions)


def _await_tokens(sessions: list[Session], count: int) -> None:
    wait_for(lambda: all(len(session.tokens) >= count for session in sessions), f"{count} tokens", PATIENCE_S)


def _kill(pid: int, number: signal.Signals) -> float:
    """Send it; the moment."""
    os.kill(pid, number)
    return time.monotonic()


def main() -> int:
    """Run the scenes and print; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("reference", "llama"), default="reference")
    parser.add_argument("--only", nargs="+", choices=tuple(SCENES), default=list(SCENES), help="some of the faults")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of llama.cpp (1)")
    parser.add_argument("--tokens", type=int, default=400, help="of each stream (400)")
    parser.add_argument("--seed", type=int, default=1, help="of the moments at which the worker is killed")
    options = parser.parse_args()
    engine = ("--engine", options.engine, "--threads", str(options.threads))
    bench = Bench((*FLAGS, *engine), options.seed, Report(), {**OPTIONS, "max_tokens": options.tokens})
    _quiet(bench)
    for name in options.only:
        SCENES[name](bench)
    report = bench.report
    print(json.dumps({"engine": options.engine, "seconds": report.figures, "broken": report.broken}, indent=1))
    return 1 if report.broken else 0


if __name__ == "__main__":
    sys.exit(main())
