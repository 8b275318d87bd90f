"""What the wire costs: ``python benchmarks/tick_roundtrip.py``.

Two processes. One encodes a tick of 32 decode rows, sends it over ``ipc://`` and decodes and validates the answer; the
other receives, decodes and validates the tick, and encodes and sends a result of 32 rows. Prints percentiles of the
round trip in microseconds.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from pathlib import Path

import zmq

from treadle_shared.codec import decode_from_worker, decode_to_worker, encode
from treadle_shared.concurrency import percentile
from treadle_shared.ticks import DecodeRow, ResultRow, Tick, TickResult

ROWS = 32
ROUNDS = 5000
WARM_UP = 500


def main() -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as folder:
        endpoint = f"ipc://{Path(folder) / 'tick.sock'}"
        socket = zmq.Context().socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(endpoint)
        other = multiprocessing.get_context("spawn").Process(target=_answer, args=(endpoint,), daemon=True)
        other.start()
        seconds = [_round(socket, number) for number in range(WARM_UP + ROUNDS)][WARM_UP:]
        socket.send(b"")
        other.join(5)
        socket.close()
    figures = [1e6 * percentile(seconds, share) for share in (0.5, 0.9, 0.99, 1.0)]
    print("microseconds    p50      p90      p99      max")
    print("round trip " + " ".join(f"{figure:8.1f}" for figure in figures))


def _round(socket: zmq.Socket[bytes], number: int) -> float:
    started = time.perf_counter()
    rows = [DecodeRow(slot, slot, number) for slot in range(ROWS)]
    socket.send(encode(Tick(broker_id="b" * 16, worker_id="w" * 32, tick_id=number, decode=rows)))
    result = decode_from_worker(socket.recv())
    assert isinstance(result, TickResult)
    assert result.tick_id == number
    return time.perf_counter() - started


def _answer(endpoint: str) -> None:
    socket = zmq.Context().socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(endpoint)
    while data := socket.recv():
        tick = decode_to_worker(data)
        assert isinstance(tick, Tick)
        rows = [ResultRow(row.slot, row.gen, 1000 + row.slot) for row in tick.decode]
        socket.send(encode(TickResult(broker_id=tick.broker_id, worker_id="w" * 32, tick_id=tick.tick_id, rows=rows)))
    socket.close()


if __name__ == "__main__":
    main()
