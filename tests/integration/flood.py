"""One peer that floods a node for two seconds: ``python flood.py RUNTIME_DIR subscriptions|queries|junk``."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import msgpack
import zmq

from treadle_shared.rundir import RuntimeDir

SECONDS = 2.0


def main() -> None:
    directory, kind = RuntimeDir(Path(sys.argv[1])), sys.argv[2]
    endpoint, data = {
        "subscriptions": (directory.telemetry, b"\x01snapshot"),
        "queries": (directory.replay, msgpack.packb(["tick", 0, 1 << 50])),
        "junk": (directory.clients, msgpack.packb([[1] * 4000] * 250)),
    }[kind]
    socket = zmq.Context().socket(zmq.XSUB if kind == "subscriptions" else zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVHWM, 1)
    socket.connect(endpoint)
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        try:
            socket.send(data, zmq.NOBLOCK)
        except zmq.Again:
            time.sleep(0.001)
    socket.close()


main()
