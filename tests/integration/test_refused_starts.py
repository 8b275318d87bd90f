"""What cannot work is refused with exit code 78 and one line: by each process and by ``treadle serve``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from real_node import RealNode
from served_node import environment, run

sys.path.append(str(Path(__file__).parents[1] / "unit"))

from gguf_files import gguf

STARTERS = ("treadle_broker", "treadle_worker", "serve")


def _whole(share: float) -> Callable[[Path, Path], None]:
    def make(path: Path, demo: Path) -> None:
        with demo.open("rb") as source:
            path.write_bytes(source.read(int(demo.stat().st_size * share)))

    return make


def _bert(path: Path, demo: Path) -> None:
    metadata: dict[str, Any] = {
        "general.architecture": "bert",
        "bert.context_length": 512,
        "bert.embedding_length": 8,
        "bert.block_count": 1,
        "bert.attention.head_count": 1,
        "bert.attention.causal": False,
        "bert.pooling_type": 1,
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": ["[PAD]", "[UNK]", "a"],
    }
    path.write_bytes(gguf(metadata, {"token_embd.weight": 24}))


MODELS: dict[str, tuple[Callable[[Path, Path], Any], str]] = {
    "missing": (lambda path, demo: None, "no such file"),
    "directory": (lambda path, demo: path.mkdir(), "is a directory"),
    "unreadable": (lambda path, demo: path.symlink_to("/proc/self/mem"), "input/output error"),
    "pipe": (lambda path, demo: os.mkfifo(path), "is not a regular file"),
    "empty": (lambda path, demo: path.touch(), "is empty"),
    "text": (lambda path, demo: path.write_text("just some text, renamed\n" * 50), "is not a GGUF file"),
    "cut at a tenth": (_whole(0.1), "is cut short"),
    "cut at a half": (_whole(0.5), "is cut short"),
    "cut at the end": (_whole(0.99), "is cut short"),
    "cut in the header": (_whole(0.001), "the header is damaged or cut short"),
    "embedding": (_bert, "is an embedding model (bert)"),
}


def _start(starter: str, folder: Path, settings: dict[str, str]) -> subprocess.CompletedProcess[str]:
    node = folder / "node"
    if starter == "serve":
        flags = [part for key, value in settings.items() for part in (f"--{key.replace('_', '-')}", value.strip('"'))]
        return run("serve", *flags, "--runtime-dir", str(node))
    node.mkdir(mode=0o700)
    (node / "node.toml").write_text("".join(f"{key} = {value}\n" for key, value in settings.items()))
    command = [sys.executable, "-m", starter, "--runtime-dir", str(node)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment())


def _refusal(starter: str, folder: Path, settings: dict[str, str]) -> str:
    """The one line, after exit code 78."""
    done = _start(starter, folder, settings)
    assert (done.returncode, done.stdout) == (78, "")
    (line,) = done.stderr.splitlines()
    if starter == "serve":
        return line
    event = json.loads(line)
    assert (event["level"], event["event"]) == ("error", "refused_to_start")
    return str(event.get("error") or event["message"])


@pytest.mark.model
@pytest.mark.parametrize("starter", STARTERS)
@pytest.mark.parametrize("kind", MODELS)
def test_a_model_that_cannot_be_served_is_one_line(tmp_path: Path, model_path: Path, kind: str, starter: str) -> None:
    make, problem = MODELS[kind]
    model = tmp_path / "model.gguf"
    make(model, model_path)
    line = _refusal(starter, tmp_path, {"model": f'"{model}"'})
    assert str(model) in line
    assert problem in line


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
@pytest.mark.parametrize("starter", STARTERS)
def test_a_model_without_permission_is_one_line(tmp_path: Path, starter: str) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    model.chmod(0)
    assert "permission denied" in _refusal(starter, tmp_path, {"model": f'"{model}"'})


@pytest.mark.parametrize("starter", STARTERS)
@pytest.mark.parametrize("value", ["1", "-1", "1000000000"])
def test_an_absurd_context_is_refused_by_its_key(tmp_path: Path, starter: str, value: str) -> None:
    assert "session_tokens" in _refusal(starter, tmp_path, {"engine": '"reference"', "session_tokens": value})


@pytest.mark.parametrize("starter", ["treadle_broker", "treadle_worker"])
@pytest.mark.parametrize(("key", "value"), [("n_ctx", "1"), ("session_tokens", "1e9"), ("max_sessions", '"eight"')])
def test_a_key_that_is_unknown_or_of_another_type_is_named(tmp_path: Path, starter: str, key: str, value: str) -> None:
    assert key in _refusal(starter, tmp_path, {"engine": '"reference"', key: value})


def test_a_second_broker_is_turned_away_before_it_looks_at_its_model(reference_node: RealNode, tmp_path: Path) -> None:
    file = tmp_path / "other.toml"
    file.write_text('model = "/no/such/model.gguf"\n')
    command = [sys.executable, "-m", "treadle_broker", "--runtime-dir", str(reference_node.path), "--config", str(file)]
    second = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment())
    assert second.returncode == 78
    (line,) = second.stderr.splitlines()
    assert "lives there already" in json.loads(line)["error"]


def test_an_unknown_key_of_serves_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "treadle.toml"
    file.write_text('engine = "reference"\nn_ctx = 1\n')
    done = run("serve", "--config", str(file), "--runtime-dir", str(tmp_path / "node"))
    assert done.returncode == 78
    (line,) = done.stderr.splitlines()
    assert "n_ctx" in line
