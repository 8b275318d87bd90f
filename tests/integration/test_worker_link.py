"""The broker's view of its worker: when it counts as silent, and what it says together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from treadle_broker.worker_link import WorkerLink
from treadle_shared.codec import encode
from treadle_shared.limits import MAX_ANSWERS
from treadle_shared.rundir import RuntimeDir
from treadle_shared.ticks import FromWorker, Heartbeat

SILENCE_S = 3.0
WAIT_MS = 10_000


class Pair:
    """A link and the socket of a worker at its other end."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], directory: RuntimeDir) -> None:
        self.link = WorkerLink(context, directory, "b", SILENCE_S)
        self.worker = context.socket(zmq.DEALER)
        self.worker.set(zmq.LINGER, 0)
        self.worker.connect(directory.worker)

    def heard(self, *frames: bytes, now: float = 100.0) -> list[FromWorker]:
        """What the link makes of a message of these frames."""
        self.worker.send_multipart(frames)
        assert self.link.socket.poll(WAIT_MS)
        return list(self.link.receive(now))


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    directory = RuntimeDir(tmp_path / "node")
    directory.create()
    with zmq.Context[zmq.Socket[bytes]]() as context:
        pair = Pair(context, directory)
        yield pair
        pair.worker.close()
        pair.link.close()


def beat(load: float = 0.0) -> Heartbeat:
    return Heartbeat(worker_id="w", pid=1, phase="loading", load=load)


def test_the_time_in_which_the_broker_slept_is_no_silence_of_the_worker(pair: Pair) -> None:
    pair.heard(encode(beat()))
    assert pair.link.silent(100.0 + SILENCE_S + 1)
    pair.link.excuse(2.0)
    assert not pair.link.silent(100.0 + SILENCE_S + 1)
    assert pair.link.silent(100.0 + SILENCE_S + 3)


def test_what_comes_together_is_heard_in_order(pair: Pair) -> None:
    said = [beat(number / MAX_ANSWERS) for number in range(MAX_ANSWERS)]
    assert pair.heard(*map(encode, said)) == said
    assert pair.link.malformed == 0


def test_a_frame_that_means_nothing_takes_no_other_with_it(pair: Pair) -> None:
    assert pair.heard(encode(beat(0.1)), b"", encode(beat(0.2))) == [beat(0.1), beat(0.2)]
    assert pair.link.malformed == 1


def test_more_than_a_worker_may_say_together_is_not_looked_at(pair: Pair) -> None:
    assert pair.heard(*[encode(beat())] * (MAX_ANSWERS + 1)) == []
    assert pair.link.malformed == 1
    assert pair.link.peer is None


def test_one_turn_hears_no_more_frames_than_a_few_messages_hold(pair: Pair) -> None:
    for _ in range(5):
        pair.worker.send_multipart([encode(beat())] * (MAX_ANSWERS - 1))
    heard: list[int] = []
    while sum(heard) < 5 * (MAX_ANSWERS - 1):
        assert pair.link.socket.poll(WAIT_MS)
        heard.append(len(list(pair.link.receive(100.0))))
    assert max(heard) <= 2 * (MAX_ANSWERS - 1)
