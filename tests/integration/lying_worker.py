"""A worker with the reference engine that says more than it should: ``python lying_worker.py RUNTIME_DIR LIE``.

- ``repeats``: every result is sent twice, and one of long ago with it
- ``invents``: results for ticks that were never sent, rows for slots and generations that are over
- ``reorders``: now and then a result waits until the next tick's has been sent
- ``loses``: now and then a result is not sent at all
- ``parts``: now and then a tick's second part comes before its first
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import zmq

from treadle_shared.codec import decode_to_worker, encode
from treadle_shared.config import read_node_config
from treadle_shared.limits import PROTOCOL_MAJOR, PROTOCOL_MINOR
from treadle_shared.rundir import RuntimeDir
from treadle_shared.runner import TickRunner
from treadle_shared.ticks import Heartbeat, ResultRow, Tick, TickResult, WorkerHello, WorkerRefused, WorkerWelcome
from treadle_worker.engines import make_engine

EVERY = 80  # ticks between two lies that cost a recovery
MEMORY = 60  # results kept to be said again

Parts = list[TickResult]


class LyingWorker:
    """Serves one node, and lies as it was told to."""

    def __init__(self, path: Path, lie: str) -> None:
        self._socket = zmq.Context().socket(zmq.DEALER)
        self._socket.connect(RuntimeDir(path).worker)
        self._config = read_node_config(path, None)
        self._engine = make_engine(self._config)
        self._runner = TickRunner(self._engine)
        self._told: deque[TickResult] = deque(maxlen=MEMORY)
        self._held: Parts = []
        self._ticks = 0
        self._lie: Callable[[Parts], Iterator[TickResult]] = getattr(self, f"_{lie}")

    def run(self) -> None:
        """Serve until killed."""
        self._hello()
        next_beat = 0.0
        while True:
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + 0.2
                self._say(Heartbeat(worker_id="liar", pid=os.getpid(), phase="ready", progress=self._ticks))
            if self._socket.poll(100):
                self._take(decode_to_worker(self._socket.recv()))

    def _take(self, message: msgspec.Struct) -> None:
        if isinstance(message, Tick):
            self._ticks += 1
            parts = list(self._runner.run(message))
            self._told.extend(parts)
            for part in self._lie(parts):
                self._say(part)
        elif isinstance(message, WorkerRefused):
            self._hello()
        elif isinstance(message, WorkerWelcome):
            self._runner.reset()
            self._held = []

    def _repeats(self, parts: Parts) -> Iterator[TickResult]:
        for part in parts:
            yield from (part, part)
        yield self._told[0]

    def _invents(self, parts: Parts) -> Iterator[TickResult]:
        over = [ResultRow(0, 0, 65), ResultRow(255, 7, 65)] if self._ticks > EVERY else []  # the first session is gone
        yield msgspec.structs.replace(parts[0], tick_id=parts[0].tick_id + 5)
        yield msgspec.structs.replace(parts[0], tick_id=(1 << 53) - 1)
        for part in parts:
            yield msgspec.structs.replace(part, rows=[*over, *part.rows], skipped=[*part.skipped, (9, 9)])

    def _reorders(self, parts: Parts) -> Iterator[TickResult]:
        if self._ticks % EVERY == 0:
            self._held = parts
            return
        yield from parts
        yield from self._held
        self._held = []

    def _loses(self, parts: Parts) -> Iterator[TickResult]:
        if self._ticks % EVERY:
            yield from parts

    def _parts(self, parts: Parts) -> Iterator[TickResult]:
        yield from parts if self._ticks % 3 else reversed(parts)

    def _hello(self) -> None:
        self._say(
            WorkerHello(
                major=PROTOCOL_MAJOR,
                minor=PROTOCOL_MINOR,
                worker_id="liar",
                pid=os.getpid(),
                engine="reference",
                model="reference",
                numerics="exact",
                facts=self._engine.facts,
            )
        )

    def _say(self, message: msgspec.Struct) -> None:
        self._socket.send(encode(message))


LyingWorker(Path(sys.argv[1]), sys.argv[2]).run()
