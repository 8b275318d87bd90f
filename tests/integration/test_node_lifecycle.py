"""How a node starts, stops, refuses to start, and loses clients."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from real_node import RealNode, wait_for

from treadle import Cancelled, Client, Draining, Unavailable

LONG = {"max_tokens": 200, "ignore_eos": True}


def _reference(make_node: Any, **settings: Any) -> RealNode:
    return make_node(engine="reference", **settings).start().wait_ready()


def test_requests_are_taken_while_the_worker_is_still_missing(make_node: Any) -> None:
    node = make_node(engine="reference").start("broker")
    wait_for(node.directory.is_live, "the broker holds its directory")
    with node.client() as client:
        status = client.status()
        assert (status["ready"], status["reason"]) == (False, "no worker")
        session = client.generate("early", max_tokens=5, ignore_eos=True)
        node.start("worker")
        assert session.wait(30.0) == "length"


def test_sigterm_under_load_finishes_what_runs(make_node: Any) -> None:
    node = _reference(make_node)
    with node.client() as client:
        sessions = [client.generate(f"{number}", **LONG) for number in range(12)]
        node.kill("broker", signal.SIGTERM)
        wait_for(lambda: _is_draining(client), "new requests are refused")
        assert [session.wait(30.0) for session in sessions] == ["length"] * 12
    assert node.processes["broker"].wait(10) == 0


def _is_draining(client: Client) -> bool:
    try:
        client.generate("late", max_tokens=1).wait()
    except Draining:
        return True
    return False


def test_a_drain_that_takes_too_long_cancels_with_a_reason(make_node: Any) -> None:
    node = make_node(engine="reference", drain_timeout_s=0.2).start("broker")
    wait_for(node.directory.is_live, "the broker holds its directory")
    with node.client() as client:
        session = client.generate("never runs", **LONG)
        node.kill("broker", signal.SIGTERM)
        with pytest.raises(Cancelled, match="draining"):
            session.result()
    assert node.processes["broker"].wait(10) == 0


def test_a_second_broker_is_turned_away_at_once(reference_node: RealNode) -> None:
    started = time.monotonic()
    command = [sys.executable, "-m", "treadle_broker", "--runtime-dir", str(reference_node.path)]
    second = subprocess.run(command, capture_output=True, timeout=30)
    assert second.returncode == 78
    assert b"lives there already" in second.stderr
    assert len(second.stderr.splitlines()) == 1
    assert time.monotonic() - started < 15
    with reference_node.client() as client:
        assert client.generate("x", max_tokens=3, ignore_eos=True).wait() == "length"


def test_a_stale_socket_file_is_no_obstacle(make_node: Any) -> None:
    node = make_node(engine="reference")
    (node.path / "clients.sock").write_bytes(b"")
    node.start().wait_ready()


def test_an_absurd_setting_is_refused_by_name(tmp_path: Path) -> None:
    directory = tmp_path / "node"
    directory.mkdir(mode=0o700)
    for key, value in (("max_sessions", "-1"), ("session_tokens", "1"), ("queue_depth", "1000000000"), ("n_ctx", "1")):
        (directory / "node.toml").write_text(f"{key} = {value}\n")
        command = [sys.executable, "-m", "treadle_broker", "--runtime-dir", str(directory)]
        refused = subprocess.run(command, capture_output=True, timeout=30)
        assert refused.returncode == 78
        assert key.encode() in refused.stderr


_VICTIM = (
    "import sys, time\nfrom treadle import Client\nclient = Client(sys.argv[1])\n"
    "for n in range(4): client.generate(str(n), max_tokens=90_000, ignore_eos=True)\n"
    "print('running', flush=True)\ntime.sleep(60)\n"
)


def _kill_a_client(node: RealNode) -> None:
    """A client process that has four sessions dies."""
    victim = subprocess.Popen([sys.executable, "-c", _VICTIM, str(node.path)], stdout=subprocess.PIPE)
    assert victim.stdout is not None
    assert victim.stdout.readline() == b"running\n"
    victim.kill()
    victim.wait()
    victim.stdout.close()


def test_a_killed_clients_sessions_end_and_free_their_slots(make_node: Any) -> None:
    node = _reference(make_node, orphan_timeout_s=0.3, session_tokens=100_000, max_sessions=2)
    _kill_a_client(node)
    seen = node.wait_idle()
    assert seen["cancelled_total"] == 4


def test_a_broker_that_was_stopped_waits_for_clients_anew(make_node: Any) -> None:
    node = _reference(make_node, orphan_timeout_s=4.0, session_tokens=100_000, max_sessions=4, worker_silence_s=60)
    _kill_a_client(node)
    node.kill("broker", signal.SIGSTOP)
    time.sleep(4.5)  # nobody could reach it all that time
    node.kill("broker", signal.SIGCONT)
    assert node.telemetry()["active_sessions"] == 4
    assert node.wait_idle()["cancelled_total"] == 4


def test_a_client_that_closes_ends_its_sessions_at_once(reference_node: RealNode) -> None:
    before = reference_node.telemetry()["cancelled_total"]
    client = reference_node.client()
    client.generate("x", **LONG)
    client.generate("y", **LONG)
    client.close()
    wait_for(lambda: reference_node.telemetry()["cancelled_total"] >= before + 1, "its sessions are cancelled")
    reference_node.wait_idle()


def test_cancelling_one_id_leaves_its_namesakes_alone(reference_node: RealNode) -> None:
    with reference_node.client() as client, reference_node.client() as other:
        first = client.generate("x", session_id="a", **LONG)
        second = client.generate("x", session_id="ab", **LONG)
        theirs = other.generate("x", session_id="a", **LONG)
        first.cancel()
        assert first.wait() == "cancelled"
        assert second.wait() == "length"
        assert theirs.wait() == "length"


def test_a_broker_that_dies_is_unavailable_within_a_second(make_node: Any) -> None:
    node = _reference(make_node, session_tokens=100_000, max_sessions=2)
    with node.client() as client:
        session = client.generate("x", max_tokens=90_000, ignore_eos=True)
        stream = iter(session)
        next(stream)
        node.kill("broker")
        died = time.monotonic()
        with pytest.raises(Unavailable):
            for _ in stream:
                pass
        assert time.monotonic() - died < 5.0


def test_a_worker_killed_in_mid_stream_is_replaced_and_the_text_is_the_same(make_node: Any) -> None:
    node = _reference(make_node, session_tokens=4096, max_sessions=4)
    with node.client() as client:
        options: dict[str, Any] = {"max_tokens": 1500, "ignore_eos": True, "temperature": 0.7, "seed": 3}
        quiet = [client.generate(f"text {number}", **options).result() for number in range(3)]
        sessions = [client.generate(f"text {number}", **options) for number in range(3)]
        wait_for(lambda: all(len(session.tokens) > 20 for session in sessions), "tokens flow")
        node.kill("worker")
        node.processes["worker"].wait()
        wait_for(lambda: not client.status()["ready"], "the loss is seen", 5.0)
        node.start("worker")
        kinds = {type(event).__name__ for event in sessions[0].events()}
        assert "Recovering" in kinds
        assert [session.result() for session in sessions] == quiet
    assert node.wait_idle()["failed_total"] == 0


def test_sockets_are_private(reference_node: RealNode) -> None:
    for socket in reference_node.path.glob("*.sock"):
        assert os.stat(socket).st_mode & 0o007 == 0
    assert os.stat(reference_node.path).st_mode & 0o077 == 0
