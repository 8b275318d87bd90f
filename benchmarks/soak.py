"""Whether a node's memory stays flat: ``python benchmarks/soak.py [--engine reference|llama] [--requests N]``.

A real node answers N one-token requests (100,000 on the reference engine, 5,000 on llama.cpp) from several clients that
keep many of them in flight. Broker, worker and the clients' own process are looked at meanwhile: anonymous memory
(RssAnon and VmSwap of /proc/PID/status), open descriptors, and what they have logged. Of the samples after the first
``--warm-up`` share of the requests, in blocks so that neighbours do not count twice, the slope in bytes per request is
fitted. Exit code 0 only where memory is flat, no descriptor is left open, and the logs are bounded. The clients' memory
is judged only over so many requests that a step of an allocator is not taken for a slope.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / "integration")]

from conftest import demo_model
from real_node import RealNode, wait_for

from treadle import Client

REQUESTS = {"reference": 100_000, "llama": 5_000}
CLIENTS = 4
IN_FLIGHT = 64  # requests of one client at a time
REMEMBERED = 70 * IN_FLIGHT  # sessions after which the broker's memory of ids, 4,096 of them, is full
SAMPLES = 400  # few, so that what is kept of them is nothing beside a leak
LOOK_S = 0.05  # how often it is seen whether the next sample is due
BLOCKS = 20  # points of the fit; memory moves in steps, and samples of one step say the same thing
FLAT_BYTES = 16.0  # per request: the smallest object that a leak could hold on to
ARENA_STEP = 132 << 10  # bytes by which malloc lets the arena of one thread grow
MAX_LOG_BYTES = 1024  # per request: one line for each, and no more
SPARE_DESCRIPTORS = 2  # a connection that is just being closed
SETTLE_S = 10.0  # how long descriptors of clients that left may take to close
NODE = {
    "max_sessions": 32,
    "session_tokens": 64,
    "queue_depth": 2 * CLIENTS * IN_FLIGHT,
    "max_prefill_tokens_per_tick": 512,
    "result_ttl_s": 0.1,  # what is kept of finished sessions must not follow the speed of the machine
    "telemetry_replay": 128,  # the rings of past telemetry are full long before the warm-up is over
    "telemetry_interval_s": 0.1,
    "log_format": "json",
}


class Samples:
    """Anonymous bytes of each process over the number of requests that have been answered."""

    def __init__(self, pids: dict[str, int]) -> None:
        self._pids = pids
        self.requests = array("q")
        self.memory = {name: array("q") for name in pids}

    def take(self, requests: int) -> None:
        """One more."""
        self.requests.append(requests)
        for name, pid in self._pids.items():
            self.memory[name].append(anonymous_bytes(pid))

    def after(self, requests: float) -> int:
        """The number of the first sample that counts."""
        return next(number for number, at in enumerate(self.requests) if at >= requests)


@dataclass(frozen=True, slots=True)
class Fit:
    """A line through memory over requests: bytes a request, and the standard error of that."""

    slope: float
    error: float

    @property
    def verdict(self) -> str:
        """``grows`` where even the slope less two errors is a leak, ``unclear`` where the errors could hide one."""
        if self.slope - 2 * self.error > FLAT_BYTES:
            return "grows"
        return "flat" if self.slope + 2 * self.error <= FLAT_BYTES else "unclear"


@dataclass(slots=True)
class Load:
    """Clients that ask until everything is answered."""

    node: RealNode
    total: int
    done: int = 0
    failed: list[BaseException] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> list[threading.Thread]:
        """The threads, started."""
        shares = [self.total // CLIENTS + (number < self.total % CLIENTS) for number in range(CLIENTS)]
        threads = [threading.Thread(target=self._guarded, args=(share,)) for share in shares]
        for thread in threads:
            thread.start()
        return threads

    def _guarded(self, share: int) -> None:
        try:
            self._ask(share)
        except BaseException as error:
            self.failed.append(error)

    def _ask(self, share: int) -> None:
        with self.node.client() as client:
            while share:
                count = min(share, IN_FLIGHT)
                _answered(client, count)
                share -= count
                with self._lock:
                    self.done += count


def _answered(client: Client, count: int) -> None:
    requests = [{"prompt": f"soak {number}", "max_tokens": 1, "ignore_eos": True} for number in range(count)]
    for session in client.submit_many(requests, timeout=120.0):
        assert session.wait(120.0) == "length"


def _remembered(client: Client) -> None:
    """Sessions that are cancelled at once: nothing of them is left but their ids, which the broker remembers."""
    for _ in range(REMEMBERED // IN_FLIGHT):
        for session in client.submit_many([{"prompt": "soak", "max_tokens": 1}] * IN_FLIGHT, timeout=120.0):
            session.cancel()
            session.wait(120.0)


def anonymous_bytes(pid: int) -> int:
    """RssAnon and VmSwap of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("RssAnon:", "VmSwap:")))


def fitted(requests: Sequence[int], memory: Sequence[int]) -> Fit:
    """Least squares over blocks of samples."""
    size = max(len(requests) // BLOCKS, 1)
    starts = range(0, len(requests) - size + 1, size)
    xs = [fmean(requests[start : start + size]) for start in starts]
    ys = [fmean(memory[start : start + size]) for start in starts]
    mid_x, mid_y = fmean(xs), fmean(ys)
    spread = sum((x - mid_x) ** 2 for x in xs)
    slope = sum((x - mid_x) * (y - mid_y) for x, y in zip(xs, ys, strict=True)) / spread
    rest = sum((y - mid_y - slope * (x - mid_x)) ** 2 for x, y in zip(xs, ys, strict=True))
    return Fit(slope, (rest / max(len(xs) - 2, 1) / spread) ** 0.5)


def soak(node: RealNode, requests: int, warm_up: float) -> dict[str, Any]:
    """Run the load and describe what it left."""
    pids = {name: process.pid for name, process in node.processes.items()} | {"clients": os.getpid()}
    with node.client() as client:
        _answered(client, IN_FLIGHT)  # whatever is opened or imported once
        _remembered(client)
    descriptors = {name: len(os.listdir(f"/proc/{pid}/fd")) for name, pid in pids.items()}
    logs = _log_bytes(node)
    load = Load(node, requests)
    began = time.monotonic()
    threads, samples = load.run(), Samples(pids)
    while any(thread.is_alive() for thread in threads):
        if load.done >= len(samples.requests) * requests / SAMPLES:
            samples.take(load.done)
        time.sleep(LOOK_S)
    seconds = time.monotonic() - began
    if load.failed:
        raise load.failed[0]
    return {
        "requests": requests,
        "seconds": round(seconds, 1),
        "requests_per_s": round(requests / seconds, 1),
        "memory": {name: _described(samples, name, samples.after(warm_up * requests)) for name in pids},
        "descriptors_left": _descriptors_left(pids, descriptors),
        "log_bytes_per_request": {
            name: round((at - logs[name]) / requests, 1) for name, at in _log_bytes(node).items()
        },
        "idle": dict(node.wait_idle())["submitted_total"] == requests + IN_FLIGHT + REMEMBERED,
    }


def _described(samples: Samples, name: str, start: int) -> dict[str, Any]:
    memory = samples.memory[name][start:]
    fit = fitted(samples.requests[start:], memory)
    return {
        "bytes_first": memory[0],
        "bytes_last": memory[-1],
        "samples": len(memory),
        "bytes_per_request": round(fit.slope, 2),
        "standard_error": round(fit.error, 2),
        "verdict": fit.verdict,
    }


def _log_bytes(node: RealNode) -> dict[str, int]:
    return {name: (node.path / f"{name}.log").stat().st_size for name in node.processes}


def _descriptors_left(pids: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    """How many more are open than before, once those that are being closed are."""

    def left() -> dict[str, int]:
        return {name: len(os.listdir(f"/proc/{pid}/fd")) - before[name] for name, pid in pids.items()}

    with suppress(AssertionError):  # the figures tell
        wait_for(lambda: max(left().values()) <= 0, "descriptors are closed", SETTLE_S)
    return left()


def failures(found: dict[str, Any]) -> list[str]:
    """What is not as promised."""
    judged = {name: one for name, one in found["memory"].items() if name != "clients" or tells_of_clients(found)}
    bad = [f"memory of {name}: {one['verdict']}" for name, one in judged.items() if one["verdict"] != "flat"]
    bad += [f"{name} left {n} descriptors" for name, n in found["descriptors_left"].items() if n > SPARE_DESCRIPTORS]
    bad += [f"{name} logs too much" for name, n in found["log_bytes_per_request"].items() if n > MAX_LOG_BYTES]
    return bad + ([] if found["idle"] else ["the counters do not balance"])


def tells_of_clients(found: dict[str, Any]) -> bool:
    """Whether the requests are so many that one step of each client thread's arena is not taken for a leak."""
    return bool(found["requests"] * FLAT_BYTES > CLIENTS * ARENA_STEP)


def main() -> int:
    """Soak and print; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=tuple(REQUESTS), default="reference")
    parser.add_argument("--requests", type=int, help="how many (100,000 on the reference engine, 5,000 on llama.cpp)")
    parser.add_argument("--warm-up", type=float, default=0.4, help="share of the requests that is left out (0.4)")
    options = parser.parse_args()
    settings: dict[str, Any] = {**NODE, "engine": options.engine}
    if options.engine == "llama":
        settings |= {"model": str(demo_model()), "threads": 1}
    node = RealNode(**settings).start().wait_ready()
    try:
        found = soak(node, options.requests or REQUESTS[options.engine], options.warm_up)
    finally:
        node.stop()
        node.remove()
    bad = failures(found)
    print(json.dumps({"engine": options.engine, **found, "failures": bad}, indent=1))
    print("flat" if not bad else f"NOT as promised: {'; '.join(bad)}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
