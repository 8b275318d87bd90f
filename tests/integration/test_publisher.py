"""The publisher sends what somebody subscribes to, and keeps what nobody does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from socket import AF_UNIX, socket

import msgpack
import pytest
import zmq

from treadle_broker.publisher import Publisher
from treadle_shared.rundir import RuntimeDir

WAIT_MS = 10_000

Socket = zmq.Socket[bytes]
Connect = Callable[[int, str], Socket]


@pytest.fixture
def context() -> Iterator[zmq.Context[Socket]]:
    context = zmq.Context[Socket]()
    yield context
    context.term()


@pytest.fixture
def directory(tmp_path: Path) -> RuntimeDir:
    directory = RuntimeDir(tmp_path / "node")
    directory.create()
    return directory


@pytest.fixture
def publisher(context: zmq.Context[Socket], directory: RuntimeDir) -> Iterator[Publisher]:
    publisher = Publisher(context, directory, "boot", keep=100)
    yield publisher
    publisher.close()


@pytest.fixture
def connect(context: zmq.Context[Socket]) -> Iterator[Connect]:
    made: list[Socket] = []

    def connect(kind: int, endpoint: str) -> Socket:
        opened = context.socket(kind)
        opened.setsockopt(zmq.RCVTIMEO, WAIT_MS)
        made.append(opened)
        opened.connect(endpoint)
        return opened

    yield connect
    for each in made:
        each.close(linger=0)


def take_turn(publisher: Publisher) -> None:
    """One turn of a loop: wait for subscriptions or queries and serve them."""
    poller = zmq.Poller()
    for source in publisher.sockets:
        poller.register(source, zmq.POLLIN)
    ready = dict(poller.poll(WAIT_MS))
    assert ready, "nothing came"
    publisher.serve(ready)


def subscribed(publisher: Publisher, reader: Socket) -> Socket:
    """A reader of the ticks, which the publisher knows of."""
    reader.setsockopt(zmq.SUBSCRIBE, b"tick")
    take_turn(publisher)
    return reader


def place(frames: list[bytes]) -> tuple[str, int]:
    """An event's topic and its number there."""
    return frames[0].decode(), int.from_bytes(frames[1], "big")


def test_a_subscription_brings_its_topic_and_no_other(
    publisher: Publisher, directory: RuntimeDir, connect: Connect
) -> None:
    reader = subscribed(publisher, connect(zmq.SUB, directory.telemetry))
    publisher.publish("session", {"n": 0})
    publisher.publish("tick", {"n": 1})
    assert place(reader.recv_multipart()) == ("tick", 0)


def test_who_comes_after_everybody_left_is_sent_events_again(
    publisher: Publisher, directory: RuntimeDir, connect: Connect
) -> None:
    first = subscribed(publisher, connect(zmq.SUB, directory.telemetry))
    first.setsockopt(zmq.UNSUBSCRIBE, b"tick")
    take_turn(publisher)
    publisher.publish("tick", {"n": 0})
    first.setsockopt(zmq.SUBSCRIBE, b"")
    take_turn(publisher)
    publisher.publish("tick", {"n": 1})
    assert place(first.recv_multipart()) == ("tick", 1)


def test_one_reader_that_leaves_takes_nothing_from_another(
    publisher: Publisher, directory: RuntimeDir, connect: Connect
) -> None:
    stays, leaves = (connect(zmq.SUB, directory.telemetry) for _ in range(2))
    for reader, prefix in ((stays, b"ti"), (leaves, b"tick")):
        reader.setsockopt(zmq.SUBSCRIBE, prefix)
        take_turn(publisher)
    leaves.close(linger=0)
    take_turn(publisher)
    publisher.publish("tick", {"n": 0})
    assert place(stays.recv_multipart()) == ("tick", 0)


# A peer of ZMTP 3.0 without security (https://rfc.zeromq.org/spec/23/) that ends a subscription it never had.
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\x00") + bytes(32)
READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB"
CANCEL = b"\x00\x05\x00tick"


def test_who_ends_a_subscription_of_others_silences_nobody(
    publisher: Publisher, directory: RuntimeDir, connect: Connect
) -> None:
    reader = subscribed(publisher, connect(zmq.SUB, directory.telemetry))
    with socket(AF_UNIX) as stranger:
        stranger.connect(directory.telemetry.removeprefix("ipc://"))
        stranger.settimeout(WAIT_MS / 1000)
        stranger.sendall(GREETING + b"\x04" + bytes([len(READY)]) + READY)
        heard = b""
        while not heard.endswith(b"XPUB"):  # the last word of the other side's handshake
            heard += stranger.recv(256)
        stranger.sendall(CANCEL)
        take_turn(publisher)
    publisher.publish("tick", {"n": 0})
    assert place(reader.recv_multipart()) == ("tick", 0)


def test_events_that_nobody_subscribed_to_are_in_the_replay(
    publisher: Publisher, directory: RuntimeDir, connect: Connect
) -> None:
    publisher.publish("tick", {"n": 7})
    replay = connect(zmq.DEALER, directory.replay)
    replay.send(msgpack.packb(["tick", 0, 0]))
    take_turn(publisher)
    kind, *event = replay.recv_multipart()
    assert kind == b"replay"
    assert place(event) == ("tick", 0)
    assert msgpack.unpackb(event[2]) == {"boot_id": "boot", "n": 7}
