"""A broker's end of the worker socket, in a test's hands, and the real worker process at the other end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zmq

from treadle_shared.codec import decode_from_worker, encode
from treadle_shared.config import config_to_toml, make_config
from treadle_shared.limits import PROTOCOL_MAJOR, PROTOCOL_MINOR
from treadle_shared.rundir import RuntimeDir
from treadle_shared.sampling import SamplingParams
from treadle_shared.ticks import (
    DecodeRow,
    FromWorker,
    Heartbeat,
    PrefillRow,
    Tick,
    TickResult,
    WorkerHello,
    WorkerRefused,
    WorkerWelcome,
)
from treadle_shared.tokens import pack_tokens

PATIENCE_S = 60.0  # far beyond what any step takes; only a failing test waits for it
POLL_MS = 50

Message = TypeVar("Message", bound=msgspec.Struct)


class WorkerDriver:
    """Starts one worker in a runtime directory of its own and answers it as a broker would, when told to."""

    def __init__(self, broker_id: str = "broker-1", environ: dict[str, str] | None = None, **settings: Any) -> None:
        self.broker_id = broker_id
        self.worker_id = ""
        self.heard: list[FromWorker] = []
        self._folder = tempfile.TemporaryDirectory(prefix="treadle-worker-")
        self.directory = RuntimeDir(Path(self._folder.name))
        config = make_config({"engine": "reference", "heartbeat_s": 0.05, "worker_silence_s": 2.0, **settings})
        (self.directory.path / "node.toml").write_text(config_to_toml(config))
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._identity = b""
        self._frames: deque[bytes] = deque()  # of a message, not yet asked for
        self._ticks = 0
        self._environ = {**os.environ, **(environ or {})}
        self.socket = self._bound()
        self.log_path = self.directory.path / "worker.log"
        self.start()

    # ---- the worker's life

    def start(self) -> None:
        """Start the worker, again where an earlier one has ended."""
        command = [sys.executable, "-m", "treadle_worker", "--runtime-dir", str(self.directory.path)]
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(command, stderr=log, env=self._environ)

    def signal(self, number: signal.Signals) -> None:
        """Send the worker a signal."""
        self.process.send_signal(number)

    def exit_code(self) -> int:
        """Wait for the worker's end."""
        return self.process.wait(PATIENCE_S)

    def log(self) -> list[dict[str, Any]]:
        """The worker's log lines."""
        return [json.loads(line) for line in self.log_path.read_text().splitlines()]

    def events(self, name: str) -> list[dict[str, Any]]:
        """The worker's log lines of one event."""
        return [line for line in self.log() if line["event"] == name]

    def close(self) -> None:
        """End the worker, whatever it is doing, and clean up."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGCONT)
            self.process.kill()
            self.process.wait()
        self.socket.close(linger=0)
        self._context.term()
        self._folder.cleanup()

    # ---- the broker's life

    def _bound(self) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.ROUTER)
        socket.set(zmq.LINGER, 0)
        socket.bind(self.directory.worker)
        return socket

    def stop_broker(self) -> None:
        """Nobody is there any more."""
        self.socket.close(linger=0)
        self.socket = self._context.socket(zmq.ROUTER)  # bound to nothing

    def restart_broker(self, broker_id: str) -> None:
        """Another broker takes the place of the one that was: new socket, new id, nothing known."""
        self.socket.close(linger=0)
        self.broker_id = broker_id
        self.socket = self._bound()

    # ---- talking

    def say(self, message: msgspec.Struct) -> None:
        """Send a message to the worker heard last."""
        self.say_raw([encode(message)])

    def say_raw(self, frames: Iterable[bytes]) -> None:
        """Send frames to the worker heard last."""
        self.socket.send_multipart([self._identity, *frames])

    def wait(self, kind: type[Message], accept: Callable[[Message], bool] = lambda _: True) -> Message:
        """The next message of a kind that is accepted; everything heard is kept in ``heard``."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            message = self.next_message()
            if isinstance(message, kind) and accept(message):
                return message
            if message is None and self.process.poll() is not None:
                raise AssertionError(f"the worker ended with {self.process.returncode}: {self.log_path.read_text()}")
        raise AssertionError(f"no {kind.__name__} in {PATIENCE_S} s: {self.log_path.read_text()[-2000:]}")

    def next_message(self) -> FromWorker | None:
        """What arrives in a moment, if anything."""
        if not self._frames and self.socket.poll(POLL_MS):
            self._identity, *frames = self.socket.recv_multipart()
            self._frames.extend(frames)
        if not self._frames:
            return None
        message = decode_from_worker(self._frames.popleft())
        self.heard.append(message)
        return message

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Listen until a condition holds."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, f"not in {PATIENCE_S} s: {what}"
            self.next_message()

    def welcome(self) -> WorkerHello:
        """Wait for the worker's hello and welcome it."""
        hello = self.wait(WorkerHello)
        self.worker_id = hello.worker_id
        self.say(
            WorkerWelcome(
                major=PROTOCOL_MAJOR, minor=PROTOCOL_MINOR, broker_id=self.broker_id, worker_id=self.worker_id
            )
        )
        return hello

    def refuse(self, reason: str) -> None:
        """Refuse the worker."""
        self.say(WorkerRefused(reason=reason, message="a test says so"))

    # ---- ticks

    def tick(self, **plan: Any) -> int:
        """Send a tick; its number."""
        self._ticks += 1
        names = {"broker_id": self.broker_id, "worker_id": self.worker_id}
        self.say(Tick(**{**names, "tick_id": self._ticks, **plan}))
        return self._ticks

    def run(self, **plan: Any) -> list[TickResult]:
        """Send a tick and collect its results."""
        return self.results(self.tick(**plan))

    def results(self, number: int) -> list[TickResult]:
        """Every part of one tick's answer."""
        parts = []
        while not parts or not parts[-1].last:
            parts.append(self.wait(TickResult, lambda result: result.tick_id == number))
        return parts

    def beats(self) -> list[Heartbeat]:
        """The heartbeats heard so far."""
        return [message for message in self.heard if isinstance(message, Heartbeat)]


def prefill(slot: int, gen: int, tokens: Iterable[int], start: int = 0, sample: bool = True) -> PrefillRow:
    """A greedy prompt chunk."""
    return PrefillRow(slot, gen, start, pack_tokens(tokens), sample, 0, None if start else SamplingParams())


def decode(slot: int, gen: int, pos: int) -> DecodeRow:
    """A row that feeds the last token back."""
    return DecodeRow(slot, gen, pos)
