"""The thread that owns the engine: the only one that touches the model and its KV cache."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread
from typing import Final

import zmq

from treadle_shared.codec import encode
from treadle_shared.config import NodeConfig
from treadle_shared.runner import TickRunner
from treadle_shared.ticks import Tick
from treadle_worker.engines import open_engine
from treadle_worker.status import WorkerStatus

RESULTS: Final = "inproc://results"
WAKE: Final = b""  # a frame of the results socket that carries no result: look at the status


@dataclass(frozen=True, slots=True)
class Reset:
    """Empty every slot: whoever sends ticks next knows none of them."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End the thread."""


Command = Tick | Reset | Stop


class EngineThread(Thread):
    """Loads the engine, then runs commands in order until Stop.

    Encoded results leave through a PAIR socket at ``RESULTS``, a tick's decode part before its prefill runs;
    changes of the status are announced by ``WAKE``. Whatever ends the thread is in ``status.failure``.
    """

    def __init__(self, config: NodeConfig, status: WorkerStatus, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        super().__init__(name="engine", daemon=True)  # a thread inside llama.cpp cannot be joined
        self._config = config
        self._status = status
        self._context = context
        self._commands: SimpleQueue[Command] = SimpleQueue()  # bounded by who puts ticks in

    def put(self, command: Command) -> None:
        """Hand a command over; may be called from the I/O thread."""
        self._commands.put(command)

    def run(self) -> None:
        """The thread's body."""
        results = self._context.socket(zmq.PAIR)
        results.connect(RESULTS)
        try:
            self._live(results)
        except BaseException as error:  # the I/O thread decides what becomes of it
            self._status.failure = error
        finally:
            self._status.tick_started = None
            self._status.ended = True
            results.send(WAKE)
            results.close(linger=-1)

    def _live(self, results: zmq.Socket[bytes]) -> None:
        opened = open_engine(self._config, self._status)
        try:
            gc.collect()
            gc.freeze()  # what a start leaves behind stays: no tick waits while it is looked through again
            self._status.load = 1.0
            self._status.phase = "ready"
            self._status.offer = opened
            results.send(WAKE)
            self._serve(TickRunner(opened.engine), results)
        finally:
            opened.close()

    def _serve(self, runner: TickRunner, results: zmq.Socket[bytes]) -> None:
        while True:
            command = self._commands.get()
            if isinstance(command, Stop):
                return
            if isinstance(command, Reset):
                runner.reset()
            else:
                self._run_tick(command, runner, results)

    def _run_tick(self, tick: Tick, runner: TickRunner, results: zmq.Socket[bytes]) -> None:
        status = self._status
        if tick.broker_id == status.broker_id and not status.draining:
            status.tick_started = time.monotonic()
            for part in runner.run(tick):
                results.send(encode(part))
            status.tick_started = None
        status.progress += 1
