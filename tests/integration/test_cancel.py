"""Cancelling: by exact id, at once, and with the slot free for the next."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
import zmq
from real_node import RealNode, wait_for

LONG: dict[str, Any] = {"max_tokens": 3000, "ignore_eos": True}


@pytest.fixture(scope="module")
def node() -> Iterator[RealNode]:
    node = RealNode(engine="reference", session_tokens=4096, max_sessions=1).start().wait_ready()
    yield node
    codes = node.stop()
    node.remove()
    assert codes == {"broker": 0, "worker": 0}


@pytest.fixture
def sockets(node: RealNode) -> Iterator[Any]:
    context = zmq.Context()
    opened: list[zmq.Socket[bytes]] = []

    def connect(kind: int, endpoint: str) -> zmq.Socket[bytes]:
        opened.append(context.socket(kind))
        opened[-1].connect(endpoint)
        return opened[-1]

    yield connect
    for socket in opened:
        socket.close(linger=0)
    context.term()


def test_a_slot_is_free_at_most_two_ticks_after_the_cancel(node: RealNode, sockets: Any) -> None:
    telemetry = sockets(zmq.SUB, node.directory.telemetry)
    telemetry.setsockopt(zmq.RCVHWM, 0)
    for topic in (b"session", b"tick", b"worker"):
        telemetry.setsockopt(zmq.SUBSCRIBE, topic)
    assert telemetry.poll(10_000), "the worker's last value tells that the subscription stands"
    with node.client() as client:
        first = client.generate("x", session_id="first", **LONG)
        second = client.generate("x", session_id="second", max_tokens=3, ignore_eos=True)
        wait_for(lambda: len(first.tokens) > 20, "it streams")
        assert first.cancel()
        assert second.wait(30) == "length"
    sent = 0
    cancelled = False
    while True:
        assert telemetry.poll(10_000)
        topic, _, body = telemetry.recv_multipart()
        event = msgpack.unpackb(body)
        if topic == b"session" and (event["event"], event["session_id"]) == ("done", "first"):
            cancelled = True
        elif topic == b"tick" and event["event"] == "sent" and cancelled:
            sent += 1
            if event["prefill"]:
                break
    assert sent <= 2


def test_a_cancelled_id_can_be_submitted_again_at_once(node: RealNode) -> None:
    with node.client() as client:
        for epoch in range(5):
            session = client.generate("x", session_id="mine", **LONG)
            assert session.epoch == epoch
            assert session.cancel()
        assert client.generate("x", session_id="mine", max_tokens=3, ignore_eos=True).wait(30) == "length"
    node.wait_idle()


def test_cancelling_is_idempotent_in_every_state(node: RealNode) -> None:
    with node.client() as client:
        running = client.generate("x", **LONG)
        queued = client.generate("x", **LONG)
        for session in (queued, running):
            assert session.cancel()
            assert session.wait(30) == "cancelled"
            assert not session.cancel()
    node.wait_idle()


@pytest.mark.parametrize("endpoint", ["clients", "control"])
def test_an_empty_id_is_refused_and_a_part_of_an_id_names_nobody(node: RealNode, sockets: Any, endpoint: str) -> None:
    peer = sockets(zmq.DEALER, getattr(node.directory, endpoint))

    def told(message: dict[str, Any]) -> dict[str, Any]:
        peer.send(msgpack.packb(message))
        assert peer.poll(10_000)
        (answer,) = msgpack.unpackb(peer.recv())
        return dict(answer)

    told({"type": "hello", "major": 1, "minor": 0})
    with node.client() as client:
        session = client.generate("x", session_id="ab", max_tokens=400, ignore_eos=True)
        failure = told({"type": "cancel", "rid": 1, "session_id": ""})
        assert (failure["type"], failure["code"], failure["field"]) == ("failure", "invalid", "session_id")
        for name in ("a", "b", "abc", "*", "AB", "ab "):
            assert told({"type": "cancel", "rid": 2, "session_id": name})["found"] is False
        assert session.wait(30) == "length"
