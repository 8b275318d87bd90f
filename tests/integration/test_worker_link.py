"""The broker's view of its worker: when it counts as silent."""

from __future__ import annotations

from pathlib import Path

import zmq

from treadle_broker.worker_link import WorkerLink
from treadle_shared.codec import encode
from treadle_shared.rundir import RuntimeDir
from treadle_shared.ticks import Heartbeat

SILENCE_S = 3.0
WAIT_MS = 10_000


def test_the_time_in_which_the_broker_slept_is_no_silence_of_the_worker(tmp_path: Path) -> None:
    directory = RuntimeDir(tmp_path / "node")
    directory.create()
    with zmq.Context[zmq.Socket[bytes]]() as context, context.socket(zmq.DEALER) as worker:
        link = WorkerLink(context, directory, "b", SILENCE_S)
        worker.connect(directory.worker)
        worker.send(encode(Heartbeat(worker_id="w", pid=1, phase="loading", load=0.5)))
        assert link.socket.poll(WAIT_MS)
        list(link.receive(now=100.0))
        assert link.silent(100.0 + SILENCE_S + 1)
        link.excuse(2.0)
        assert not link.silent(100.0 + SILENCE_S + 1)
        assert link.silent(100.0 + SILENCE_S + 3)
        link.close()
