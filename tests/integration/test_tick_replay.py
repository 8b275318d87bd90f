"""A node's tick log, replayed: what the processes did is what the scheduler alone decides."""

from __future__ import annotations

import json
import random
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from real_node import RealNode, wait_for

from treadle import Client, Overloaded
from treadle_broker.tick_file import TickReader, predecessor
from treadle_broker.tick_records import (
    Cancelled,
    Completed,
    LookedFull,
    Opened,
    Planned,
    Refused,
    Submitted,
    WorkerLost,
)
from treadle_shared.tokens import pack_tokens

TEXT = "zebra quartz number "
IGNORED = {"ignore_eos": True, "temperature": 0.8}


def logged_node(make_node: Any, **settings: Any) -> tuple[RealNode, Path]:
    """A node with the reference engine and a log in its own directory."""
    node = make_node(engine="reference", max_sessions=4, queue_depth=6, session_tokens=2048)
    path = node.path / "ticks.log"
    config = node.path / "node.toml"
    text = config.read_text().replace('tick_log = ""', f'tick_log = "{path}"')
    config.write_text(text + "".join(f"{key} = {value}\n" for key, value in settings.items()))
    return node.start().wait_ready(), path


def replayed(path: Path) -> tuple[int, dict[str, Any]]:
    """Exit code and report of the command."""
    command = [sys.executable, "-m", "treadle.cli", "replay", str(path), "--json"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.stderr == ""
    return run.returncode, json.loads(run.stdout)


def some_load(node: RealNode, client: Client) -> list[list[int]]:
    """Sessions that end, are cancelled, and wait; some that are refused; the worker killed in their midst."""
    choices = random.Random(1)
    names = [f"zebra-{number}" for number in range(10)]
    sessions = [
        client.generate(TEXT + "x" * choices.randrange(200), max_tokens=600, session_id=name, seed=number, **IGNORED)
        for number, name in enumerate(names)
    ]
    for _ in range(3):
        with pytest.raises(Overloaded):
            client.generate(TEXT, max_tokens=5)
    wait_for(lambda: len(sessions[0].tokens) > 50, "tokens flow")
    sessions[1].cancel()
    sessions[7].cancel()
    node.kill("worker")
    node.processes["worker"].wait()
    wait_for(lambda: not client.status()["ready"], "the loss is seen", 5.0)
    sessions[2].cancel()
    node.start("worker")
    for number, session in enumerate(sessions):
        assert session.wait(60.0) == ("cancelled" if number in (1, 2, 7) else "length")
    return [session.tokens for session in sessions if len(session.tokens) > 50]


def test_load_cancels_and_a_killed_worker_are_decided_again_without_a_difference(make_node: Any) -> None:
    node, path = logged_node(make_node)
    with node.client() as client:
        answers = some_load(node, client)
    assert node.wait_idle()["failed_total"] == 0

    code, report = replayed(path)
    assert (code, report["differences"], report["torn_bytes"], report["damaged"]) == (0, 0, 0, False)
    assert report["records"] > 1200

    with path.open("rb") as stream:
        reader = TickReader(stream)
        kinds = {type(record) for record in (reader.opened(), *reader.records())}
    assert kinds >= {Opened, Submitted, LookedFull, Refused, Cancelled, Planned, Completed, WorkerLost}
    data = path.read_bytes()
    assert b"zebra" not in data
    for tokens in answers:
        assert pack_tokens(tokens[10:14]) not in data
        assert bytes(tokens[10:18]) not in data


def test_the_log_of_a_killed_broker_replays_up_to_its_last_call(make_node: Any) -> None:
    node, path = logged_node(make_node)
    with node.client() as client:
        sessions = [client.generate(TEXT, max_tokens=1500, **IGNORED) for _ in range(4)]
        wait_for(lambda: all(len(session.tokens) > 100 for session in sessions), "tokens flow")
        node.kill("broker")
        node.processes["broker"].wait()
    code, report = replayed(path)
    assert (code, report["differences"]) == (0, 0)
    assert report["records"] > 200
    node.start("broker").wait_ready()
    assert replayed(predecessor(path))[1]["records"] == report["records"]
    assert replayed(path)[0] == 0


def test_a_disk_that_takes_no_more_closes_the_log_and_not_the_node(make_node: Any) -> None:
    node, path = logged_node(make_node)
    full = path.stat().st_size + 20_000
    resource.prlimit(node.processes["broker"].pid, resource.RLIMIT_FSIZE, (full, full))
    with node.client() as client:
        answers = [client.generate(TEXT, max_tokens=300, **IGNORED) for _ in range(4)]
        assert [answer.wait(60.0) for answer in answers] == ["length"] * 4
    assert path.stat().st_size <= full
    assert node.log("broker").count('"tick_log_closed"') == 1
    assert replayed(path)[0] == 0


def test_a_log_that_cannot_be_made_is_refused_at_start(make_node: Any) -> None:
    node = make_node(engine="reference", tick_log="/missing/ticks.log")
    command = [sys.executable, "-m", "treadle_broker", "--runtime-dir", str(node.path)]
    refused = subprocess.run(command, capture_output=True, timeout=30)
    assert refused.returncode == 78
    assert b"tick_log: /missing/ticks.log" in refused.stderr


def test_a_file_that_is_no_log_ends_the_command_with_78(tmp_path: Path) -> None:
    file = tmp_path / "-x.log"
    file.write_text("hello")
    command = [sys.executable, "-m", "treadle.cli", "replay", str(file)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.returncode == 78
    assert run.stdout == ""
    assert run.stderr.count("\n") == 1
