"""Faults of the engine on a supervised node: nothing accepted is lost, and only a culprit fails."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from real_node import wait_for
from served_node import ServedNode

from treadle import Session, SessionFailed

POISON = "\x07"  # byte 7: no other prompt of these tests holds it
OPTIONS: dict[str, Any] = {"max_tokens": 300, "ignore_eos": True, "temperature": 0.8, "seed": 9}
FLAGS = ("--engine", "reference", "--max-sessions", "8", "--session-tokens", "1024", "--log-format", "json")


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Any]:
    nodes: list[ServedNode] = []

    def start(*flags: str) -> ServedNode:
        nodes.append(ServedNode(tmp_path / f"node{len(nodes)}", *FLAGS, *flags))
        return nodes[-1].wait_ready()

    yield start
    for node in nodes:
        node.process.terminate()
        node.process.wait(30)
        node.process.stdout.close()  # type: ignore[union-attr]


def _quiet(serve: Any, prompts: list[str]) -> list[str]:
    with serve().client() as client:
        return [session.result() for session in [client.generate(prompt, **OPTIONS) for prompt in prompts]]


@pytest.mark.parametrize("fault", ["kill@token=7", "segv@token=7", "exit@token=7", "code-3@token=7", "code1@token=7"])
def test_a_request_that_breaks_the_engine_fails_alone(serve: Any, fault: str) -> None:
    prompts = [f"innocent {number}" for number in range(7)]
    quiet = _quiet(serve, prompts)
    with serve("--faults", fault).client() as client:
        sessions = [client.generate(prompt, **OPTIONS) for prompt in prompts]
        wait_for(lambda: all(len(session.tokens) > 5 for session in sessions), "tokens flow")
        poison = client.generate(f"x{POISON}x", **OPTIONS)
        with pytest.raises(SessionFailed, match="poison"):
            poison.result(timeout=120)
        assert [session.result(timeout=120) for session in sessions] == quiet
        telemetry = client.telemetry()
        assert (telemetry["failed_total"], telemetry["done_total"]) == (1, 7)


def test_batches_that_fail_now_and_then_change_no_text(serve: Any) -> None:
    prompts = [f"text {number}" for number in range(8)]
    quiet = _quiet(serve, prompts)
    with serve("--faults", "code-2@every=70").client() as client:
        sessions = [client.generate(prompt, **OPTIONS) for prompt in prompts]
        assert [session.result(timeout=120) for session in sessions] == quiet
        assert client.status()["kv_drift_rows"] == 0


def test_a_stream_killed_five_times_beside_seven_others_is_the_quiet_one(serve: Any) -> None:
    prompts = [f"long {number}" for number in range(8)]
    quiet = _quiet(serve, prompts)
    node: ServedNode = serve()
    with node.client() as client:
        sessions = [client.generate(prompt, **OPTIONS) for prompt in prompts]
        for kill in range(5):
            _await_tokens(sessions, 40 * (kill + 1))
            worker = client.status()["pids"]["worker"]
            os.kill(worker, signal.SIGKILL)
            wait_for(lambda old=worker: node.ready_without("worker", old), "another worker serves", 30)
        assert [session.result(timeout=120) for session in sessions] == quiet
        assert client.telemetry()["failed_total"] == 0


def test_a_stopped_worker_is_seen_replaced_and_the_streams_go_on(serve: Any) -> None:
    prompts = [f"frozen {number}" for number in range(8)]
    quiet = _quiet(serve, prompts)
    node: ServedNode = serve("--tick-timeout-s", "2")
    with node.client() as client:
        sessions = [client.generate(prompt, **OPTIONS) for prompt in prompts]
        _await_tokens(sessions, 40)
        worker = client.status()["pids"]["worker"]
        stopped = time.monotonic()
        os.kill(worker, signal.SIGSTOP)
        wait_for(lambda: not client.status()["ready"], "the loss is seen", 10)
        assert time.monotonic() - stopped < 15
        wait_for(lambda: node.ready_without("worker", worker), "another worker serves", 30)
        assert [session.result(timeout=120) for session in sessions] == quiet


def test_a_decode_that_never_returns_is_ended_and_the_streams_go_on(serve: Any) -> None:
    prompts = [f"stalled {number}" for number in range(4)]
    quiet = _quiet(serve, prompts)
    with serve("--tick-timeout-s", "1", "--faults", "stall@call=120").client() as client:
        sessions = [client.generate(prompt, **OPTIONS) for prompt in prompts]
        assert [session.result(timeout=180) for session in sessions] == quiet


def _await_tokens(sessions: list[Session], count: int) -> None:
    wait_for(lambda: all(len(session.tokens) >= count or session.finish_reason for session in sessions), "tokens", 60)
