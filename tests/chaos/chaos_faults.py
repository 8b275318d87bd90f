"""The faults of a chaos run. Each does one thing to the node and returns when it is done."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq
from chaos_load import Tally, ask_poison
from served_node import ServedNode

from treadle import Client, TreadleError
from treadle_shared.rundir import RuntimeDir

_VICTIM = (
    "import sys, time\nfrom treadle import Client\nclient = Client(sys.argv[1])\n"
    "sessions = [client.generate('victim %d' % n, max_tokens=200, ignore_eos=True) for n in range(3)]\n"
    "print('running', flush=True)\ntime.sleep(120)\n"
)


@dataclass(slots=True)
class Target:
    """What faults act on."""

    node: ServedNode
    random: random.Random
    tally: Tally

    def pid(self, name: str) -> int | None:
        """The process id as the node tells it now."""
        pid: int | None = (self.node.status().get("pids") or {}).get(name)
        return pid


def kill_worker(target: Target) -> None:
    """SIGKILL the worker."""
    _signal(target, "worker", signal.SIGKILL)


def crash_worker(target: Target) -> None:
    """SIGSEGV the worker."""
    _signal(target, "worker", signal.SIGSEGV)


def freeze_worker(target: Target) -> None:
    """SIGSTOP the worker: its supervisor has to see it."""
    _signal(target, "worker", signal.SIGSTOP)


def pause_worker(target: Target) -> None:
    """SIGSTOP the worker and let it go on: too short to be replaced, perhaps long enough to be given up."""
    pid = _signal(target, "worker", signal.SIGSTOP)
    time.sleep(target.random.uniform(0.2, 4.0))
    _signal_pid(pid, signal.SIGCONT)


def kill_broker(target: Target) -> None:
    """SIGKILL the broker."""
    _signal(target, "broker", signal.SIGKILL)


def pause_broker(target: Target) -> None:
    """SIGSTOP the broker for a moment."""
    pid = _signal(target, "broker", signal.SIGSTOP)
    time.sleep(target.random.uniform(0.2, 3.5))
    _signal_pid(pid, signal.SIGCONT)


def kill_client(target: Target) -> None:
    """A client process with three sessions dies."""
    process = _victim(target)
    process.kill()
    _bury(process)


def freeze_client(target: Target) -> None:
    """A client process stops reading for a while, and then dies."""
    process = _victim(target)
    process.send_signal(signal.SIGSTOP)
    time.sleep(target.random.uniform(0.5, 4.0))
    process.kill()
    _bury(process)


def burst(target: Target) -> None:
    """Four times more requests than the node can hold."""
    with Client(target.node.path, timeout=30.0) as client:
        for _ in range(100):
            try:
                client.generate("burst", max_tokens=3)
            except TreadleError:
                target.tally.outcomes["burst refused"] += 1


def garbage(target: Target) -> None:
    """Bytes that are no message, on every socket."""
    directory = RuntimeDir(Path(target.node.path))
    context = zmq.Context()
    try:
        for endpoint in (directory.clients, directory.control, directory.worker, directory.replay, directory.telemetry):
            socket = context.socket(zmq.SUB if endpoint == directory.telemetry else zmq.DEALER)
            socket.setsockopt(zmq.LINGER, 50)
            socket.connect(endpoint)
            for _ in range(50):
                data = target.random.randbytes(target.random.randrange(0, 2000))
                if endpoint == directory.telemetry:
                    socket.setsockopt(zmq.SUBSCRIBE, data[:100])
                else:
                    socket.send_multipart([data] * target.random.randrange(1, 4))
            socket.close()
    finally:
        context.term()


def deaf_subscriber(target: Target) -> None:
    """A telemetry subscriber that never reads."""
    context = zmq.Context()
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVHWM, 1)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    socket.connect(RuntimeDir(Path(target.node.path)).telemetry)
    time.sleep(target.random.uniform(0.5, 3.0))
    socket.close()
    context.term()


def connect_storm(target: Target) -> None:
    """Two hundred clients come and go."""
    context = zmq.Context()
    directory = RuntimeDir(Path(target.node.path))
    for _ in range(200):
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(directory.clients)
        socket.send(b"\x83\xa4type\xa5hello\xa5major\x01\xa5minor\x00")
        socket.close()
    context.term()


def poison(target: Target) -> None:
    """A request that kills the worker each time it runs."""

    def run() -> None:
        try:
            with Client(target.node.path, resume=True, timeout=30.0) as client:
                ask_poison(client, target.tally)
        except TreadleError:
            target.tally.outcomes["poison unavailable"] += 1

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


FAULTS: tuple[Callable[[Target], None], ...] = (
    kill_worker,
    crash_worker,
    freeze_worker,
    pause_worker,
    kill_broker,
    pause_broker,
    kill_client,
    freeze_client,
    burst,
    garbage,
    deaf_subscriber,
    connect_storm,
    poison,
)


def _signal(target: Target, name: str, number: int) -> int | None:
    pid = target.pid(name)
    _signal_pid(pid, number)
    return pid


def _signal_pid(pid: int | None, number: int) -> None:
    if pid is None:
        return
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _victim(target: Target) -> subprocess.Popen[Any]:
    command = [sys.executable, "-c", _VICTIM, str(target.node.path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    process.stdout.readline()  # "running", or nothing where the node refused it
    return process


def _bury(process: subprocess.Popen[Any]) -> None:
    process.wait()
    assert process.stdout is not None
    process.stdout.close()
