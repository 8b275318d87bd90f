"""Peers that say what they should not, on every socket: they harm nobody but themselves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq
from real_node import RealNode, wait_for

from treadle import InvalidRequest, Overloaded
from treadle_shared import EngineFacts, bytevocab, codec, ticks
from treadle_shared.calls import Ask, Attach, Cancel, Decisions, Done, Goodbye, Hello, Request, Submit
from treadle_shared.limits import MAX_FRAME_BYTES
from treadle_shared.sampling import SamplingParams

LONG: dict[str, Any] = {"max_tokens": 3000, "ignore_eos": True}


class Peer:
    """A DEALER that sends anything anywhere."""

    def __init__(self, endpoint: str, **options: int) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 100)
        for name, value in options.items():
            self.socket.setsockopt(getattr(zmq, name), value)
        self.socket.connect(endpoint)
        self._heard: list[Any] = []

    def say(self, *messages: Any) -> Peer:
        for message in messages:
            self.socket.send(codec.encode(message))
        return self

    def hear(self, kind: type, timeout_s: float = 10.0) -> Any:
        """The next message of a kind; those before it are forgotten."""
        deadline = time.monotonic() + timeout_s
        while self._heard or self.socket.poll(max(0, int((deadline - time.monotonic()) * 1000))):
            if not self._heard:
                self._heard = codec.decode_to_client(self.socket.recv())
            while self._heard:
                message = self._heard.pop(0)
                if isinstance(message, kind):
                    return message
        raise AssertionError(f"no {kind.__name__}")

    def close(self) -> None:
        self.socket.close()
        self._context.term()


@pytest.fixture
def node(make_node: Any) -> RealNode:
    return make_node(engine="reference", session_tokens=4096, max_sessions=4).start().wait_ready()


@pytest.fixture
def peer() -> Iterator[Any]:
    peers: list[Peer] = []

    def make(endpoint: str, **options: int) -> Peer:
        peers.append(Peer(endpoint, **options))
        return peers[-1]

    yield make
    for one in peers:
        one.close()


@pytest.fixture
def stream(node: RealNode) -> Iterator[None]:
    """A session that must come out whole, from processes that must not have changed."""
    pids = {name: process.pid for name, process in node.processes.items()}
    with node.client() as client:
        quiet = client.generate("neighbour", **LONG).result()
        session = client.generate("neighbour", **LONG)
        wait_for(lambda: session.tokens, "it streams")
        yield
        assert session.result(timeout=60) == quiet
        assert client.status()["pids"] == pids


@pytest.mark.parametrize(
    "query",
    [["snapshot", float("inf"), 1], ["snapshot", True, 1], ["nosuch", 0, 1], [{}, 1, 2], [], None],
)
def test_a_replay_query_that_is_none_is_counted(node: RealNode, peer: Any, stream: None, query: Any) -> None:
    replay = peer(node.directory.replay)
    replay.socket.send(msgpack.packb(query))
    with node.client() as client:
        wait_for(lambda: client.status()["counters"]["bad_replay_queries"] == 1, "it is counted")


def _hello(worker_id: str, **facts: Any) -> ticks.WorkerHello:
    settings = {
        "recipe_fingerprint": "r",
        "n_vocab": bytevocab.N_VOCAB,
        "context_tokens": 4096,
        "max_sequences": 4,
        "kv_bytes_per_token": 1536,
        "weight_bytes": 1,
        "tokenizer_fingerprint": bytevocab.FINGERPRINT,
    }
    return ticks.WorkerHello(
        major=1,
        minor=0,
        worker_id=worker_id,
        pid=1,
        engine="reference",
        model="m",
        numerics="exact",
        facts=EngineFacts(**{**settings, **facts}),
    )


def _worker_id(node: RealNode) -> str:
    lines = [line for line in node.log("broker").splitlines() if '"worker_ready"' in line]
    found: str = json.loads(lines[-1])["worker_id"]
    return found


@pytest.mark.parametrize("phase", ["loading", "draining", "ready"])
def test_a_strangers_heartbeat_under_the_workers_name_changes_nothing(
    node: RealNode, peer: Any, stream: None, phase: str
) -> None:
    stranger = peer(node.directory.worker)
    stranger.say(ticks.Heartbeat(worker_id=_worker_id(node), pid=1, phase=phase))
    assert stranger.socket.poll(5000)


@pytest.mark.parametrize("facts", [{}, {"kv_bytes_per_token": 0}, {"n_vocab": -1}, {"context_tokens": 1 << 60}])
def test_a_strangers_hello_under_the_workers_name_is_refused(
    node: RealNode, peer: Any, stream: None, facts: dict[str, int]
) -> None:
    stranger = peer(node.directory.worker)
    stranger.say(_hello(_worker_id(node), **facts), _hello("other", **facts))
    time.sleep(0.2)  # nothing to wait for: whatever comes, the stream must not notice


def test_unfit_workers_are_refused_however_often_they_ask(make_node: Any, peer: Any) -> None:
    node = make_node(engine="reference").start("broker")
    wait_for(node.directory.is_live, "the broker holds its directory")
    os.kill(node.processes["broker"].pid, signal.SIGSTOP)
    stranger, other = peer(node.directory.worker), peer(node.directory.worker)
    stranger.say(*[_hello("w", tokenizer_fingerprint="other")] * 3)
    other.say(ticks.Heartbeat(worker_id="v", pid=1, phase="loading"))
    os.kill(node.processes["broker"].pid, signal.SIGCONT)
    assert stranger.socket.poll(10_000)
    node.start("worker")
    node.wait_ready()


def test_the_control_endpoint_streams_too(node: RealNode, peer: Any) -> None:
    control, other = peer(node.directory.control), peer(node.directory.clients)
    control.say(Hello(major=1, minor=0), Submit(rid=1, requests=[Request(prompt="x", max_tokens=5)]))
    assert control.hear(Done)
    other.say(Hello(major=1, minor=0), Submit(rid=1, requests=[Request(prompt="x", max_tokens=50)]))
    decision = other.hear(Decisions).decisions[0]
    admission = decision.admission
    control.say(Attach(rid=2, session_id=admission.session_id, epoch=admission.epoch, key=decision.key))
    assert control.hear(Done).session_id == admission.session_id


def test_a_group_with_a_key_that_is_in_use_is_answered(make_node: Any, peer: Any) -> None:
    node = make_node(engine="reference", session_tokens=65_536, max_sessions=2).start().wait_ready()
    client = peer(node.directory.clients)
    first, second = b"1" * 16, b"2" * 16
    long = [Request(prompt="y" * 20_000, max_tokens=1, key=key) for key in (first, second)]
    client.say(Hello(major=1, minor=0), Submit(rid=1, requests=long[:1]), Submit(rid=2, requests=long))
    assert client.hear(Decisions).rid == 1
    answer = client.hear(Decisions)
    assert answer.rid == 2
    assert {decision.admission.reason for decision in answer.decisions} == {"REJECTED_DUPLICATE"}


def test_sessions_of_a_client_that_left_while_its_text_was_tokenised_do_not_run(make_node: Any, peer: Any) -> None:
    node = make_node(engine="reference", session_tokens=65_536, max_sessions=2).start().wait_ready()
    client = peer(node.directory.clients)
    requests = [Request(prompt="z" * 17_000, max_tokens=40_000, params=SamplingParams(ignore_eos=True))] * 2
    client.say(Hello(major=1, minor=0), Submit(rid=1, requests=requests), Goodbye())
    wait_for(lambda: node.telemetry()["active_sessions"] == 0, "nobody runs")
    node.wait_idle()


def test_too_many_tokens_for_an_answer_are_a_typed_failure(node: RealNode, stream: None) -> None:
    with node.client() as client:
        session = client.generate("x", **LONG)
        with pytest.raises(InvalidRequest) as refused:
            client.tokenize("1" * 600_000)
        assert refused.value.field == "text"
        assert session.wait(60) == "length"


def test_a_backlog_arrives_in_frames_that_a_client_can_decode(make_node: Any, peer: Any) -> None:
    node = make_node(engine="reference", session_tokens=2048, max_sessions=8).start().wait_ready()
    slow = peer(node.directory.clients, RCVHWM=1)
    slow.say(Hello(major=1, minor=0))
    params = SamplingParams(ignore_eos=True, logprobs=20)
    slow.say(Submit(rid=1, requests=[Request(prompt="x", max_tokens=800, params=params)] * 8))
    wait_for(lambda: node.telemetry()["done_total"] == 8, "all have run", 60)
    done = tokens = 0
    while done < 8:
        assert slow.socket.poll(10_000)
        frame = slow.socket.recv()
        assert len(frame) <= MAX_FRAME_BYTES // 2
        for message in codec.decode_to_client(frame):
            done += isinstance(message, Done)
            tokens += len(getattr(message, "tokens", b"")) // 4
    assert tokens == 8 * 800


def test_whoever_polls_a_full_node_only_moves_its_own_turn(make_node: Any) -> None:
    node = make_node(engine="reference", max_sessions=1, queue_depth=0, session_tokens=4096).start().wait_ready()
    with node.client() as rude, node.client() as polite:

        def told(client: Any) -> float:
            with pytest.raises(Overloaded) as refused:
                client.generate("y", max_tokens=500)
            return float(refused.value.retry_after_s or 0)

        session = rude.generate("x", max_tokens=4000, ignore_eos=True)
        for _ in range(100):
            told(rude)
        after_many = told(polite)
        for _ in range(400):
            told(rude)
        assert told(polite) < 2 * after_many
        session.cancel()
        node.wait_idle()
        rude.generate("x", max_tokens=4000, ignore_eos=True)
        assert told(polite) < after_many / 5


@pytest.mark.parametrize("kind", ["subscriptions", "queries", "junk"])
def test_a_flood_does_not_stop_a_neighbours_stream(node: RealNode, peer: Any, kind: str) -> None:
    with node.client() as client:
        session = client.generate("x", max_tokens=3500, ignore_eos=True)
        wait_for(lambda: session.tokens, "it streams")
        script = Path(__file__).parent / "flood.py"
        flood = subprocess.Popen([sys.executable, str(script), str(node.path), kind])
        longest, last, count = 0.0, time.monotonic(), len(session.tokens)
        while flood.poll() is None:
            if len(session.tokens) != count:
                longest, last, count = max(longest, time.monotonic() - last), time.monotonic(), len(session.tokens)
            if session.finish_reason is not None:
                session = client.generate("x", max_tokens=3500, ignore_eos=True)
                count = 0
            time.sleep(0.002)
        assert max(longest, time.monotonic() - last) < 3.0
        session.cancel()


def test_an_unknown_secret_cancels_nothing(node: RealNode, peer: Any, stream: None) -> None:
    with node.client() as client:
        session = client.generate("x", session_id="mine", **LONG)
        thief = peer(node.directory.clients)
        thief.say(Hello(major=1, minor=0), Cancel(rid=1, session_id="mine", key=b"0" * 16), Ask(rid=2, what="sessions"))
        assert session.wait(60) == "length"


@pytest.mark.parametrize("name", ["broker.lock", "clients.sock", "telemetry.sock"])
def test_a_runtime_directory_that_cannot_be_used_is_exit_78_and_one_line(make_node: Any, name: str) -> None:
    node = make_node(engine="reference")
    (node.path / name).mkdir()
    node.start("broker")
    assert node.processes["broker"].wait(30) == 78
    assert len([line for line in node.log("broker").splitlines() if '"error"' in line]) == 1
    assert "Traceback" not in node.log("broker")
