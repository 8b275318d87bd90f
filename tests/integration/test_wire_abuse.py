"""Bytes that are no message, on every socket of a node, while eight streams run: the streams do not notice."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq
from real_node import RealNode, wait_for

from treadle import Client
from treadle_shared.limits import MAX_FRAME_BYTES

OPTIONS: dict[str, Any] = {"max_tokens": 1200, "ignore_eos": True, "temperature": 0.8, "seed": 7}
PROMPTS = [f"abused {number}" for number in range(8)]
SETTINGS: dict[str, Any] = {"engine": "reference", "session_tokens": 2048, "max_sessions": 8, "queue_depth": 16}
SOCKETS = {
    "clients": "malformed_from_clients",
    "control": "malformed_from_clients",
    "worker": "malformed_from_workers",
    "replay": "bad_replay_queries",
    "telemetry": "bad_subscriptions",
}
"""Every socket and the counter that its abuse moves."""

HTTP = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)  # ZMTP 3.0
HELLO = msgpack.packb({"type": "hello", "major": 1, "minor": 0, "client": "somebody"})
BEAT = msgpack.packb({"type": "heartbeat", "worker_id": "x", "pid": 1, "phase": "loading"})


@pytest.fixture(scope="module")
def node() -> Iterator[RealNode]:
    node = RealNode(**SETTINGS).start().wait_ready()
    yield node
    codes = node.stop()
    node.remove()
    assert codes == {"broker": 0, "worker": 0}


@pytest.fixture(scope="module")
def quiet(node: RealNode) -> list[str]:
    with node.client() as client:
        return [session.result() for session in [client.generate(prompt, **OPTIONS) for prompt in PROMPTS]]


@pytest.fixture
def counters(node: RealNode, quiet: list[str]) -> Iterator[Any]:
    """Eight streams that must come out whole, from processes that must not have changed; a look at the counters."""
    pids = {name: process.pid for name, process in node.processes.items()}
    with node.client() as client:
        sessions = [client.generate(prompt, **OPTIONS) for prompt in PROMPTS]
        wait_for(lambda: all(session.tokens for session in sessions), "they stream")
        yield lambda: client.status()["counters"]
        assert not all(session.finish_reason for session in sessions), "the abuse was over only after the streams"
        assert [session.result(60) for session in sessions] == quiet
        assert client.status()["pids"] == pids
    assert node.wait_idle()["failed_total"] == 0


def _bad_frames() -> list[list[bytes]]:
    """Messages of one frame or more, none of which means anything."""
    noise = random.Random(5)
    return [
        *[[noise.randbytes(noise.randrange(1, 200))] for _ in range(100)],
        [b""],
        [HTTP],
        [HELLO[:-5]],
        [BEAT[:-5]],
        [HELLO + b"more"],
        [b"\x91" * 200],
        [b"\x81\xa1a" * 200],
        [b"\xdd\xff\xff\xff\xff"],
        [b"\xdf\xff\xff\xff\xff"],
        [b"\xc6\xff\xff\xff\xffabc"],
        [msgpack.packb({"type": "nobody knows", "rid": 1})],
        [msgpack.packb({"rid": 1})],
        [msgpack.packb({"type": ["hello"], "major": 1, "minor": 0})],
        [msgpack.packb({"type": "hello", "major": 99, "minor": 0, "more": 1})],
        [msgpack.packb({"type": "hello", "major": 1, "minor": -1})],
        [msgpack.packb({"type": "heartbeat", "worker_id": 7, "pid": 1, "phase": "loading"})],
        [msgpack.packb({"type": "result", "broker_id": "b", "worker_id": "w", "tick_id": 0, "rows": [[999, 0, 1]]})],
        [b"x"] * 10_000,
        [HELLO, HELLO],
        [b"", b"", b""],
    ]


@pytest.mark.parametrize("name", SOCKETS)
def test_bytes_that_mean_nothing_are_counted_and_harm_nobody(node: RealNode, counters: Any, name: str) -> None:
    before, open_before = counters()[SOCKETS[name]], _descriptors(node)
    messages = _bad_frames()
    with _peer(node, name) as peer:
        for frames in messages:
            peer.send_multipart(frames)
        wait_for(lambda: counters()[SOCKETS[name]] >= before + len(messages) * 3 // 4, "they are counted")
    with _peer(node, name) as peer:  # what is too large costs the connection that it comes on
        peer.send(b"\xc4" * (MAX_FRAME_BYTES + 1))
        peer.send(b"\x91" * MAX_FRAME_BYTES)
        peer.send_multipart([b"y" * 200_000] * 50)
        for opening in _bad_openings():
            _say_raw(node.directory.path / f"{name}.sock", opening)
    wait_for(lambda: _descriptors(node) <= open_before, "no descriptor is left open")


def test_other_versions_other_workers_and_strangers_results_are_refused(node: RealNode, counters: Any) -> None:
    before = counters()
    with _peer(node, "clients") as peer:
        peer.send(msgpack.packb({"type": "hello", "major": 99, "minor": 0, "client": "from the future"}))
        (failure,) = msgpack.unpackb(_answer(peer))
        assert (failure["type"], failure["code"]) == ("failure", "version")
    with _peer(node, "worker") as peer:
        for tick in range(200):
            rows = [[slot, slot, 65] for slot in range(8)]
            result = {"type": "result", "broker_id": "b", "worker_id": "w", "tick_id": tick, "rows": rows}
            peer.send(msgpack.packb(result))
        for _ in range(200):
            assert msgpack.unpackb(_answer(peer))["reason"] == "busy"
    assert counters()["malformed_from_clients"] == before["malformed_from_clients"] + 1
    assert counters()["strangers"] >= before["strangers"] + 200


def test_a_thousand_connections_that_come_and_go_at_once_harm_nobody(node: RealNode, counters: Any) -> None:
    context = zmq.Context()
    for _ in range(1000):
        peer = context.socket(zmq.DEALER)
        peer.setsockopt(zmq.LINGER, 0)
        peer.connect(node.directory.clients)
        peer.send(HELLO)
        peer.close()
    context.term()
    with Client(node.path) as client:
        assert client.generate("after all of them", max_tokens=3, ignore_eos=True).wait(60) == "length"


def _bad_openings() -> list[bytes]:
    """What a connection may say instead of ZeroMQ's own protocol, or in the middle of it."""
    noise = random.Random(6)
    ready = b"\x04\x29\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER" + b"\x08Identity" + bytes(4)
    endless = struct.pack(">BQ", 0x02, 1 << 62)  # a frame that says it is that long
    return [
        *(b"", HTTP, b"\0", b"\xff" * 10, GREETING[:20], GREETING, GREETING + noise.randbytes(50)),
        *(GREETING + ready, GREETING + ready + endless + b"z" * 1000, GREETING + ready + noise.randbytes(1000)),
        *(noise.randbytes(4000) for _ in range(20)),
    ]


def _descriptors(node: RealNode) -> int:
    return len(os.listdir(f"/proc/{node.processes['broker'].pid}/fd"))


@contextlib.contextmanager
def _peer(node: RealNode, name: str) -> Iterator[zmq.Socket[bytes]]:
    context = zmq.Context()
    peer = context.socket(zmq.XSUB if name == "telemetry" else zmq.DEALER)
    peer.setsockopt(zmq.LINGER, 0)
    peer.setsockopt(zmq.RCVHWM, 0)
    peer.connect(getattr(node.directory, name))
    try:
        yield peer
    finally:
        peer.close()
        context.term()


def _answer(peer: zmq.Socket[bytes]) -> bytes:
    assert peer.poll(10_000), "no answer"
    return peer.recv()


def _say_raw(path: Path, data: bytes) -> None:
    """Say it and hang up, or be hung up on."""
    with socket.socket(socket.AF_UNIX) as raw:
        raw.settimeout(5)
        raw.connect(str(path))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            raw.sendall(data)
