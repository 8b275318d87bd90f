"""What waits for a client leaves in order, a bounded frame at a time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq

from treadle_broker.connections import Connection, Connections
from treadle_shared.calls import Position
from treadle_shared.codec import decode_to_client

Pair = tuple[Connections, Connection, "zmq.Socket[bytes]"]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A client that said hello, and its end of the socket."""
    with zmq.Context[zmq.Socket[bytes]]() as context, context.socket(zmq.ROUTER) as router:
        router.set(zmq.ROUTER_MANDATORY, 1)
        router.bind("inproc://broker")
        with context.socket(zmq.DEALER) as dealer:
            dealer.set(zmq.ROUTING_ID, b"one")
            dealer.connect("inproc://broker")
            dealer.send(b"hello")
            identity, _ = router.recv_multipart()
            connections, connection = Connections(), Connection(identity, router, admin=False)
            connections.open(connection)
            yield connections, connection, dealer


def _heard(dealer: zmq.Socket[bytes]) -> list[list[int]]:
    frames = []
    while dealer.poll(50):
        frames.append([message.ahead for message in decode_to_client(dealer.recv()) if isinstance(message, Position)])
    return frames


def _say(connections: Connections, connection: Connection, count: int) -> None:
    for number in range(count):
        connection.say(Position(session_id="s", epoch=1, ahead=number))
    connections.touch(connection)


def test_one_frame_goes_where_one_is_asked_for_and_the_rest_follows_in_order(pair: Pair) -> None:
    connections, connection, dealer = pair
    _say(connections, connection, 2500)
    assert connections.flush(1.0, frames=1) == []
    first = _heard(dealer)
    assert len(first) == 1
    assert connections.blocked()
    assert connections.flush(1.0) == []
    assert not connections.blocked()
    assert [number for frame in [*first, *_heard(dealer)] for number in frame] == list(range(2500))


def test_a_client_that_has_gone_is_told_by_either_kind_of_flush(pair: Pair) -> None:
    connections, connection, dealer = pair
    for frames in (1, 100):
        _say(connections, Connection(b"nobody", connection.socket, admin=False), 1)
        gone = connections.flush(1.0, frames=frames)
        assert [one.identity for one in gone] == [b"nobody"]
        for one in gone:
            connections.close(one)
    assert not connections.blocked()
    assert _heard(dealer) == []
