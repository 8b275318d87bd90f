"""``treadle serve``: one ready line, children that are replaced, and an end in good order."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from real_node import wait_for
from served_node import ServedNode, environment, facts_of, is_alive, run

from treadle import Unavailable
from treadle.control import Control
from treadle.supervise.supervisor import ECHO_S

REFERENCE = ("--engine", "reference", "--session-tokens", "4096", "--max-sessions", "4")
LONG = {"max_tokens": 1500, "ignore_eos": True}

Serve = Callable[..., ServedNode]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Starts nodes; kills what is left of them after the test."""
    nodes: list[ServedNode] = []

    def start(*flags: str) -> ServedNode:
        nodes.append(ServedNode(tmp_path / f"node{len(nodes)}", *(flags or REFERENCE)))
        return nodes[-1]

    yield start
    for node in nodes:
        if node.process.poll() is None:
            node.signal(signal.SIGTERM)
            node.signal(signal.SIGTERM)
        node.wait()
        print(f"---- {node.path}\n{node.errors[-4000:]}")  # pytest shows it where a test failed


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedNode]:
    """One node for the tests that leave it as they found it."""
    node = ServedNode(tmp_path_factory.mktemp("served") / "node", *REFERENCE).wait_ready()
    yield node
    assert node.stop() == 0
    assert len(node.lines) == 1


# ---- ready


def test_ready_is_one_line_and_status_waits_for_it(serve: Serve) -> None:
    node = serve()
    waited = node.run("status", "--wait", "--timeout", "60", "--json")
    assert waited.returncode == 0
    facts = facts_of(waited)
    assert facts["ready"] is True
    assert {"reason", "exact", "recipe", "model", "pids", "telemetry"} <= set(facts)
    node.wait_ready()
    assert node.lines == [f"ready: reference exact=yes sessions=4 runtime-dir={node.path}"]
    assert node.stop() == 0
    assert not any(is_alive(pid) for pid in facts["pids"].values())
    assert len(node.lines) == 1


def test_the_ready_line_can_be_json(serve: Serve) -> None:
    node = serve(*REFERENCE, "--json").wait_ready()
    assert json.loads(node.lines[0]) == {
        "ready": True,
        "model": "reference",
        "exact": True,
        "sessions": 4,
        "runtime_dir": str(node.path),
    }


def test_flags_win_over_variables(tmp_path: Path) -> None:
    path = tmp_path / "node"
    command = [sys.executable, "-m", "treadle.cli", "serve", "--engine", "reference", "--max-sessions", "3"]
    settings = environment() | {"TREADLE_MAX_SESSIONS": "5", "TREADLE_RUNTIME_DIR": str(path)}
    with subprocess.Popen(command, env=settings, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        assert b"sessions=3" in process.stdout.readline()
        facts = facts_of(run("status", "--json", "--runtime-dir", str(path)))
        assert facts["limits"]["max_sessions"] == 3
        process.terminate()
        assert process.wait(30) == 0


def test_a_second_node_in_the_same_directory_fails_fast_in_one_line(node: ServedNode) -> None:
    began = time.monotonic()
    second = node.run("serve", *REFERENCE)
    assert time.monotonic() - began < 8.0
    assert (second.returncode, second.stdout) == (78, "")
    (line,) = second.stderr.splitlines()
    assert str(node.path) in line
    assert node.status()["ready"]


def test_a_worker_that_cannot_start_ends_the_node_with_78_and_no_restart(serve: Serve) -> None:
    node = serve("--engine", "reference", "--weight-bytes", "1")
    assert node.wait() == 78
    assert node.lines == []
    assert sum("exited with code 78" in line for line in node.said) == 1
    assert not any("restarting" in line for line in node.said)
    assert "weight_bytes" in node.errors
    assert not node.directory.is_live()


# ---- children that die


def test_a_killed_worker_is_replaced_and_streams_go_on(serve: Serve) -> None:
    node = serve().wait_ready()
    with node.client() as client:
        quiet = client.generate("x", **LONG).result()
        session = client.generate("x", **LONG)
        wait_for(lambda: len(session.tokens) > 10, "tokens flow")
        pid = node.pids()["worker"]
        _kill(pid)
        assert session.result(30.0) == quiet
    wait_for(lambda: node.ready_without("worker", pid), "the node is ready with another worker")
    assert any("the worker was ended by SIGKILL; restarting it" in line for line in node.said)
    wait_for(lambda: node.said[-1] == "treadle: ready again", "serve says so")
    assert node.stop() == 0
    assert len(node.lines) == 1


def test_a_killed_broker_is_replaced_and_clients_come_back(serve: Serve) -> None:
    node = serve().wait_ready()
    with node.client() as client:
        session = client.generate("x", **LONG)
        pids = node.pids()
        _kill(pids["broker"])
        with pytest.raises(Unavailable):
            session.result(10.0)
        facts = wait_for(lambda: node.ready_without("broker", pids["broker"]), "the node is ready again")
        assert facts["pids"]["worker"] == pids["worker"], "a broker's death does not unload the model"

        def again() -> bool:
            try:
                return client.generate("x", max_tokens=3, ignore_eos=True).wait() == "length"
            except Unavailable:
                return False

        wait_for(again, "the same client serves again")
    assert node.stop() == 0


def test_no_child_outlives_a_killed_supervisor(serve: Serve) -> None:
    node = serve().wait_ready()
    pids = node.pids()
    node.signal(signal.SIGKILL)
    assert node.wait() == -signal.SIGKILL
    wait_for(lambda: not any(is_alive(pid) for pid in pids.values()), "broker and worker end too")


def test_what_runs_when_the_supervisor_is_killed_finishes(serve: Serve) -> None:
    node = serve().wait_ready()
    pids = node.pids()
    with node.client() as client:
        session = client.generate("x", **LONG)
        pieces = iter(session)
        next(pieces)
        node.signal(signal.SIGKILL)
        assert session.wait(30.0) == "length"
    wait_for(lambda: not any(is_alive(pid) for pid in pids.values()), "broker and worker end then")


def test_nobody_waits_for_a_worker_that_no_supervisor_will_start(serve: Serve) -> None:
    node = serve(*REFERENCE, "--drain-timeout-s", "3600").wait_ready()
    pids = node.pids()
    with node.client() as client:
        session = client.generate("x", max_tokens=4000, ignore_eos=True)
        pieces = iter(session)
        next(pieces)
        node.signal(signal.SIGSTOP)  # so that it starts no other
        _kill(pids["worker"])
        node.signal(signal.SIGKILL)
        assert session.wait(30.0) == "cancelled"
    wait_for(lambda: not any(is_alive(pid) for pid in pids.values()), "the broker ends too")


def _kill(pid: int) -> None:
    subprocess.run(["kill", "-9", str(pid)], check=True)


# ---- the end


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_drains_what_runs(serve: Serve, number: signal.Signals) -> None:
    node = serve().wait_ready()
    with node.client() as client:
        session = client.generate("x", **LONG)
        node.signal(number)
        assert session.wait(30.0) == "length"
    assert node.wait() == 0


def test_a_second_signal_kills(serve: Serve) -> None:
    node = serve(*REFERENCE, "--drain-timeout-s", "3600").wait_ready()
    with node.client() as client:
        session = client.generate("x", max_tokens=4000, ignore_eos=True)
        pids = node.pids()
        node.signal(signal.SIGTERM)
        wait_for(lambda: any(line.endswith("draining") for line in node.said), "the drain has begun")
        time.sleep(2 * ECHO_S)  # an earlier one would be taken for an echo of the first
        node.signal(signal.SIGTERM)
        assert node.wait() == 128 + signal.SIGTERM
        with pytest.raises(Unavailable):
            session.result(5.0)
    assert not any(is_alive(pid) for pid in pids.values())


def test_drain_stops_the_node_and_serve_ends_well(serve: Serve) -> None:
    node = serve(*REFERENCE, "--coalesce-ms", "0").wait_ready()  # a drain that is long enough to be looked at
    before = len(node.said)
    with node.client() as client:
        sessions = [client.generate("x", max_tokens=3000, ignore_eos=True) for _ in range(4)]
        drained = node.run("drain", "--timeout", "30", "--json")
        assert {session.wait(5.0) for session in sessions} == {"length"}
    assert drained.returncode == 0
    assert facts_of(drained)["stopped"] is True
    assert node.wait() == 0
    assert set(node.said[before:]) == {"treadle: draining", "treadle: the broker has drained"}


# ---- the other commands


def test_generate_streams_text_and_tells_facts(node: ServedNode) -> None:
    facts = facts_of(node.run("generate", "hi", "--max-tokens", "8", "--ignore-eos", "--seed", "7", "--json"))
    assert (facts["finish_reason"], facts["seed"], len(facts["tokens"])) == ("length", 7, 8)
    plain = node.run("generate", "-", "--max-tokens", "8", "--ignore-eos", input="hi")
    assert (plain.returncode, plain.stderr) == (0, "")
    assert plain.stdout == facts["text"] + "\n"


def test_chat_answers_once_or_line_by_line(node: ServedNode) -> None:
    once = node.run("chat", "hello", "--max-tokens", "4", "--ignore-eos")
    assert once.returncode == 0
    lines = [
        node.run("chat", "--max-tokens", "4", "--ignore-eos", "--json", input=text) for text in ("a\n", "a\nb\n\n")
    ]
    assert [done.returncode for done in lines] == [0, 0]
    assert [len(done.stdout.splitlines()) for done in lines] == [1, 2]


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (("generate", ""), 65, "prompt"),
        (("generate", "x", "--max-tokens", "0"), 65, "max_tokens"),
        (("generate", "x", "--temperature", "nan"), 65, "temperature"),
        (("generate", "x", "--max-tokens", "100000"), 65, "REJECTED_CONTEXT"),
        (("generate", "x", "--logprobs", "1"), 65, "logprobs"),
        (("cancel", "nobody"), 1, ""),
    ],
)
def test_an_error_is_one_line_and_an_exit_code(
    node: ServedNode, arguments: tuple[str, ...], code: int, named: str
) -> None:
    done = node.run(*arguments)
    assert done.returncode == code
    assert len((done.stdout + done.stderr).splitlines()) == 1
    assert named in done.stderr
    assert "Traceback" not in done.stderr


def test_no_node_is_exit_69_and_status_that_waits_gives_up(tmp_path: Path) -> None:
    for arguments in (("status",), ("status", "--wait", "--timeout", "0.2"), ("sessions",), ("tail",)):
        done = run(*arguments, "--runtime-dir", str(tmp_path / "none"))
        assert done.returncode == 69
        assert len(done.stderr.splitlines()) == 1


def test_a_reader_that_leaves_ends_the_command_and_its_session(node: ServedNode) -> None:
    command = [sys.executable, "-m", "treadle.cli", "generate", "x", "--max-tokens", "4000", "--ignore-eos"]
    with subprocess.Popen(
        [*command, "--runtime-dir", str(node.path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(4)
        process.stdout.close()
        assert process.wait(30) == 141
        assert process.stderr.read() == b""
    with node.client() as client:
        wait_for(lambda: client.telemetry()["active_sessions"] == 0, "the session is cancelled", 5.0)


def test_ctrl_c_ends_the_command_and_its_session(node: ServedNode) -> None:
    command = [sys.executable, "-m", "treadle.cli", "generate", "x", "--max-tokens", "4000", "--ignore-eos"]
    with subprocess.Popen(
        [*command, "--runtime-dir", str(node.path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait(30) == 130
        assert process.stderr.read() == b""
    with node.client() as client:
        wait_for(lambda: client.telemetry()["active_sessions"] == 0, "the session is cancelled", 5.0)


def test_sessions_lists_what_runs_and_cancel_ends_it(node: ServedNode) -> None:
    with node.client() as client:
        session = client.generate("x", max_tokens=4000, ignore_eos=True, session_id="victim")
        listed = facts_of(node.run("sessions", "--json"))["sessions"]
        assert [row["session_id"] for row in listed] == ["victim"]
        assert "victim" in node.run("sessions").stdout
        assert node.run("cancel", "victim").returncode == 0
        assert session.wait(5.0) == "cancelled"


def test_tail_prints_json_lines(node: ServedNode) -> None:
    done = node.run("tail", "--topic", "snapshot", "--count", "3")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["topic"] for line in lines] == ["snapshot"] * 3
    assert [line["sequence"] - lines[0]["sequence"] for line in lines] == [0, 1, 2]
    assert all(line["boot_id"] for line in lines)


@pytest.mark.parametrize("depth", ["1", "2"])
def test_a_sweep_on_real_nodes_has_the_figures_of_the_one_in_process(depth: str) -> None:
    rows = [
        (64, 1.0, 1, 1.375, 15360),
        (33, 1.75, 2, 2.667, 29184),
        (19, 3.111, 4, 4.632, 52224),
        (15, 4.0, 7, 5.867, 75264),
    ]
    for where in ((), ("--in-process",)):
        done = run("sweep", "--engine", "reference", "--depth", depth, "--json", *where)
        found = json.loads(done.stdout)
        names = ("ticks", "avg_occupancy", "max_occupancy", "tokens_per_tick", "peak_kv_bytes")
        assert [tuple(level[name] for name in names) for level in found["levels"]] == rows
        assert (found["saturation_concurrency"], found["corruption_free"]) == (8, True)
        assert (found["cache_misses"], found["rejected_admissions"]) == (0, 0)


def test_the_demo_streams_eight_answers_and_leaves_nothing_behind(tmp_path: Path) -> None:
    done = run("demo", "--engine", "reference", "--max-tokens", "16", "--json", "--runtime-dir", str(tmp_path / "n"))
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["finished"], summary["answers"], summary["idle"]) == (8, 8, True)
    assert (summary["kv_bytes"], summary["active_sessions"], summary["queue_depth"]) == (0, 0, 0)
    assert summary["occupancy_max"] >= 2
    assert 0 < summary["ttft_p50_s"] <= summary["ttft_p99_s"]


def test_a_demo_that_cannot_start_shows_the_nodes_own_words(tmp_path: Path) -> None:
    done = run("demo", "--engine", "reference", "--weight-bytes", "1", "--runtime-dir", str(tmp_path / "n"))
    assert done.returncode == 78
    assert "weight_bytes" in done.stderr


def test_the_command_line_needs_nothing_of_the_node() -> None:
    heavy = {"numpy", "structlog", "llama_cpp", "rich", "jinja2", "treadle_broker", "treadle_worker"}
    script = f"import sys; from treadle.cli.entry import make_parser; make_parser(); print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.strip() == "set()"


def test_an_interrupted_demo_leaves_no_process_behind(tmp_path: Path) -> None:
    path = tmp_path / "n"
    command = [sys.executable, "-m", "treadle.cli", "demo", *REFERENCE, "--max-tokens", "3000"]
    with subprocess.Popen(
        [*command, "--runtime-dir", str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    ) as process:
        assert process.stdout is not None
        for _ in range(9):  # eight questions, and the first line of an answer
            process.stdout.readline()
        with Control(path) as control:
            pids = control.status()["pids"]
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        assert process.returncode == 130
    assert not any(is_alive(pid) for pid in pids.values())
