"""A telemetry subscriber against a publisher that loses messages on purpose."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest
import zmq

from treadle.errors import Unavailable
from treadle.tail import Gap, TelemetryEvent, TelemetryTail
from treadle_shared.rundir import NodeLock, RuntimeDir

WAIT_S = 10.0


class FakePublisher:
    """An XPUB and a replay ROUTER. Events 0 to ``kept`` can be replayed; ``publish`` sends any of them."""

    def __init__(self, directory: RuntimeDir) -> None:
        self.directory = directory
        self.boot_id = "b"
        self.first_kept = 0
        self.answers = True
        self.queries: list[list[object]] = []
        directory.create()
        self._lock = NodeLock(directory)
        self._lock.acquire()
        self._context = zmq.Context[zmq.Socket[bytes]]()
        self._out = self._socket(zmq.XPUB)
        self._out.bind(directory.telemetry)
        self._replay = self._socket(zmq.ROUTER)
        self._replay.bind(directory.replay)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def wait_for_subscriber(self) -> None:
        """Return once somebody has subscribed."""
        assert self._out.poll(int(WAIT_S * 1000))
        self._out.recv()

    def publish(self, *sequences: int, topic: str = "tick") -> None:
        """Send these events of a topic."""
        for sequence in sequences:
            self._out.send_multipart(self._frames(topic, sequence))

    def close(self) -> None:
        """Close the sockets."""
        self._stop.set()
        self._thread.join(5.0)
        self._out.close()
        self._replay.close()
        self._context.term()
        self._lock.release()

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        return socket

    def _frames(self, topic: str, sequence: int) -> list[bytes]:
        body = msgpack.packb({"boot_id": self.boot_id, "n": sequence})
        return [topic.encode(), sequence.to_bytes(8, "big"), body]

    def _serve(self) -> None:
        while not self._stop.is_set():
            if not self._replay.poll(5):
                continue
            client, query = self._replay.recv_multipart()
            topic, first, last = msgpack.unpackb(query)
            self.queries.append([topic, first, last])
            frames = [client, b"replay"]
            for sequence in range(max(first, self.first_kept), last + 1):
                frames += self._frames(topic, sequence)
            if self.answers:
                self._replay.send_multipart(frames)


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[FakePublisher]:
    publisher = FakePublisher(RuntimeDir(tmp_path / "node"))
    yield publisher
    publisher.close()


@pytest.fixture
def tail(publisher: FakePublisher) -> Iterator[TelemetryTail]:
    with TelemetryTail(publisher.directory.path) as tail:
        publisher.wait_for_subscriber()
        yield tail


def _numbers(items: list[TelemetryEvent | Gap]) -> list[int]:
    return [item.facts["n"] for item in items if isinstance(item, TelemetryEvent)]


def test_events_come_in_order_without_gaps(publisher: FakePublisher, tail: TelemetryTail) -> None:
    publisher.publish(5, 6)
    publisher.publish(1, topic="session")
    assert [_numbers(tail.receive(WAIT_S)) for _ in range(3)] == [[5], [6], [1]]
    assert tail.receive(0.0) == []


def test_a_gap_is_filled_from_the_replay(publisher: FakePublisher, tail: TelemetryTail) -> None:
    publisher.publish(1, 5)
    tail.receive(WAIT_S)
    items = tail.receive(WAIT_S)
    assert _numbers(items) == [2, 3, 4, 5]
    assert [item.replayed for item in items if isinstance(item, TelemetryEvent)] == [True, True, True, False]
    assert items[3] == Gap("tick", 2, 4, recovered=3)
    assert publisher.queries == [["tick", 2, 4]]


def test_what_the_replay_no_longer_has_is_reported_as_lost(publisher: FakePublisher, tail: TelemetryTail) -> None:
    publisher.first_kept = 4
    publisher.publish(1, 5)
    tail.receive(WAIT_S)
    assert Gap("tick", 2, 4, recovered=1) in tail.receive(WAIT_S)


def test_a_long_gap_is_fetched_in_pieces(publisher: FakePublisher, tail: TelemetryTail) -> None:
    publisher.publish(0, 2_000)
    tail.receive(WAIT_S)
    assert _numbers(tail.receive(WAIT_S)) == list(range(1, 2_001))
    assert len(publisher.queries) > 1


def test_a_replay_that_does_not_answer_costs_only_the_gap(
    publisher: FakePublisher, tail: TelemetryTail, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("treadle.tail.REPLAY_TIMEOUT_MS", 50)
    publisher.answers = False
    publisher.publish(1, 3)
    tail.receive(WAIT_S)
    items = tail.receive(WAIT_S)
    assert items[0] == Gap("tick", 2, 2, recovered=0)
    assert _numbers(items) == [3]


def test_a_new_broker_is_no_gap(publisher: FakePublisher, tail: TelemetryTail) -> None:
    publisher.publish(700)
    publisher.boot_id = "next"
    publisher.publish(0, 1)
    assert [_numbers(tail.receive(WAIT_S)) for _ in range(3)] == [[700], [0], [1]]
    assert publisher.queries == []


def test_only_the_topics_asked_for_come(publisher: FakePublisher) -> None:
    with TelemetryTail(publisher.directory.path, ("session",)) as tail:
        publisher.wait_for_subscriber()
        publisher.publish(1)
        publisher.publish(1, topic="session")
        (event,) = tail.receive(WAIT_S)
        assert isinstance(event, TelemetryEvent)
        assert event.topic == "session"


def test_without_a_broker_there_is_nothing_to_follow(tmp_path: Path) -> None:
    with pytest.raises(Unavailable):
        TelemetryTail(tmp_path / "nothing")
