"""What a client that stops reading costs the others.

``python benchmarks/stalled_reader.py [--engine reference|llama] [--seconds 60]``

Four clients stream one session after the other. For ``--seconds`` they are alone; then a client of its own process
submits 20 sessions and is stopped (SIGSTOP) for as long, while its sessions run; then it reads on. Prints the
streaming clients' inter-token latency before and meanwhile, the broker's anonymous memory, and whether the stopped
client missed anything. Exit code 0 only where it missed nothing, memory stayed within what its unread tokens may take,
and nobody else's stream failed. Before the client stops, twenty sessions of the same length run that are read, so that
the latencies compare like with like.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / "integration")]

from conftest import demo_model
from real_node import RealNode, wait_for
from soak import anonymous_bytes

from treadle import Client
from treadle_shared.concurrency import percentile

STALLED = 20  # sessions of the client that stops
OTHERS = 4
OTHERS_TOKENS = 200
BYTES_PER_UNREAD = 256  # of the broker's memory a token: its id, its text, their places in two lists
SPARE_BYTES = 16 << 20  # what the allocator keeps
MAX_SLOWER = 1.5  # of p99: a second of other load on a shared machine is more
RATE = {"reference": 100, "llama": 4}  # tokens a second and session at the least, so that they are still running
NODE = {"max_sessions": STALLED + OTHERS, "queue_depth": 64, "log_format": "json", "result_ttl_s": 600.0}


@dataclass(slots=True)
class Streams:
    """Clients that stream all the time and note when tokens come."""

    node: RealNode
    gaps: dict[str, list[float]] = field(default_factory=lambda: {"before": [], "meanwhile": []})
    phase: str = ""
    failed: list[BaseException] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def run(self) -> list[threading.Thread]:
        """The threads, started."""
        threads = [threading.Thread(target=self._guarded, args=(number,)) for number in range(OTHERS)]
        for thread in threads:
            thread.start()
        return threads

    def _guarded(self, number: int) -> None:
        try:
            with self.node.client() as client:
                while not self.over.is_set():
                    self._follow(client, number)
        except BaseException as error:
            self.failed.append(error)

    def _follow(self, client: Client, number: int) -> None:
        session = client.generate(f"other {number}", max_tokens=OTHERS_TOKENS, ignore_eos=True)
        last = None
        for _ in session.events():
            now = time.monotonic()
            if last is not None and self.phase:
                self.gaps[self.phase].append(now - last)
            last = now


def requests(tokens: int) -> list[dict[str, Any]]:
    """What the client asks for, stopped or not."""
    options = {"max_tokens": tokens, "ignore_eos": True, "temperature": 0.7}
    return [{"prompt": f"stalled {number}", "seed": number, **options} for number in range(STALLED)]


def measure(node: RealNode, seconds: float, tokens: int) -> dict[str, Any]:
    """Both phases."""
    broker = node.processes["broker"].pid
    streams = Streams(node)
    threads = streams.run()
    try:
        reading = _reader(node, tokens)
        _wait_line(reading, "running")
        memory = {"before": anonymous_bytes(broker)}
        _phase(streams, "before", seconds)
        quiet = _answers(reading)
        stopped = _reader(node, tokens)
        _wait_line(stopped, "running")
        stopped.send_signal(signal.SIGSTOP)
        memory["at_stop"] = anonymous_bytes(broker)
        _phase(streams, "meanwhile", seconds)
        wait_for(lambda: _stalled_done(node), "the stopped client's sessions have run to their ends", 600.0)
        memory["at_end"] = anonymous_bytes(broker)
        stopped.send_signal(signal.SIGCONT)
        late = _answers(stopped)
    finally:
        streams.over.set()
        for thread in threads:
            thread.join()
    return {
        "seconds": seconds,
        "sessions": STALLED,
        "tokens_each": tokens,
        "itl_ms": {phase: _latency(gaps) for phase, gaps in streams.gaps.items()},
        "broker_bytes": memory,
        "missed": sum(mine != other for mine, other in zip(late, quiet, strict=True)),
        "whole": all(len(answer) == tokens for answer in late),
        "others_failed": [repr(error) for error in streams.failed],
    }


def _phase(streams: Streams, name: str, seconds: float) -> None:
    streams.phase = name
    time.sleep(seconds)
    streams.phase = ""


def _stalled_done(node: RealNode) -> bool:
    seen = node.telemetry()
    return bool(seen["active_sessions"] <= OTHERS)


def _latency(gaps: list[float]) -> dict[str, float]:
    return {"count": len(gaps)} | {f"p{int(100 * q)}": round(1e3 * percentile(gaps, q), 2) for q in (0.5, 0.99)}


def _reader(node: RealNode, tokens: int) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--read", str(node.path), "--tokens", str(tokens)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def _wait_line(process: subprocess.Popen[str], expected: str) -> None:
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    assert line == expected, f"the reader said {line!r}"


def _answers(process: subprocess.Popen[str]) -> list[list[int]]:
    """What a reader got, once it is through."""
    text, _ = process.communicate(timeout=600.0)
    answers: list[list[int]] = json.loads(text)
    return answers


def read(path: str, tokens: int) -> None:
    """The other process: submit, say so, read everything, print it."""
    with Client(path) as client:
        sessions = client.submit_many(requests(tokens))
        print("running", flush=True)
        for session in sessions:
            session.wait()
        print(json.dumps([session.tokens for session in sessions]))


def failures(found: dict[str, Any]) -> list[str]:
    """What is not as promised."""
    memory, itl = found["broker_bytes"], found["itl_ms"]
    bound = found["sessions"] * found["tokens_each"] * BYTES_PER_UNREAD + SPARE_BYTES
    checks = {
        "the stopped client missed something": found["missed"] or not found["whole"],
        "another stream failed": found["others_failed"],
        f"the broker took more than {bound} bytes": memory["at_end"] - memory["before"] > bound,
        f"p99 is more than {MAX_SLOWER} times as long": itl["meanwhile"]["p99"] > MAX_SLOWER * itl["before"]["p99"],
    }
    return [what for what, bad in checks.items() if bad]


def main() -> int:
    """Measure and print; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=tuple(RATE), default="reference")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long the client does not read (60)")
    parser.add_argument("--tokens", type=int, help="of each of its sessions (by default enough to run that long)")
    parser.add_argument("--read", help=argparse.SUPPRESS)
    options = parser.parse_args()
    tokens = options.tokens or int(RATE[options.engine] * options.seconds)
    if options.read:
        read(options.read, tokens)
        return 0
    settings: dict[str, Any] = {**NODE, "engine": options.engine, "session_tokens": max(512, tokens + 256)}
    if options.engine == "llama":
        settings |= {"model": str(demo_model()), "threads": 1}
    node = RealNode(**settings).start().wait_ready()
    try:
        found = measure(node, options.seconds, tokens)
    finally:
        node.stop()
        node.remove()
    bad = failures(found)
    print(json.dumps({"engine": options.engine, **found, "failures": bad}, indent=1))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
