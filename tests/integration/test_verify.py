"""Exactness on the demo model and on other quantisations of it: proved where it holds, denied where it does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from real_node import RealNode

pytestmark = pytest.mark.model

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

# One engine in a process of its own: the library reads its kernel switches once.
SELF_TEST = """
import dataclasses, json, sys
from treadle_shared.config import make_config
from treadle_worker import LlamaEngine
from treadle_worker.llama.model import LlamaModel
from treadle_worker.llama.switches import choose_switches
model, changes = sys.argv[1], json.loads(sys.argv[2])
kv_type = changes.pop("kv_type", "auto")
config = make_config({"model": model, "session_tokens": 256, "numerics": "exact", "threads": 1, "kv_type": kv_type})
choose = lambda *use: dataclasses.replace(choose_switches(*use), **changes)
if not changes.pop("roles", True):
    LlamaModel.keeps_roles = property(lambda model: False, lambda model, value: None)
engine = LlamaEngine(config, choose=choose)
print(json.dumps([engine.facts.exact, engine.exact_detail, engine.model.library.tiny_blas]))
engine.close()
"""


@pytest.fixture(scope="module")
def quants(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The demo model in other quantisations, by name."""
    names, folder = ("q4_k_m", "f16"), tmp_path_factory.mktemp("quants")
    found = run(BENCHMARKS / "make_quants.py", "--model", model_path, "--cache", folder, *names).split()
    return dict(zip(names, found, strict=True))


def run(script: Path, *arguments: object, timeout_s: float = 240.0) -> str:
    """A program's standard output; what it says otherwise is shown where it fails."""
    command = [sys.executable, str(script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def self_test(model: str | Path, **changes: bool | str) -> tuple[bool, str, bool]:
    """Verdict and detail of an engine whose switches or KV type are changed, and whether the build has tinyBLAS."""
    command = [sys.executable, "-c", SELF_TEST, str(model), json.dumps(changes)]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GGML_")}  # others' switches
    exact, detail, tiny_blas = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, env=clean).stdout)
    return exact, detail, tiny_blas


def verify(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "treadle.cli", "verify", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=280)


def test_the_demo_model_is_proved_exact() -> None:
    done = verify("--quick", "--threads", 1, "--json")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["exact"]
    assert report["self_test"]
    assert report["lacks"] == []
    assert not [case["name"] for case in report["cases"] if case["skipped"] or case["equal"] < case["outputs"]]
    names = " ".join(case["name"] for case in report["cases"])
    for kind in (
        "batch of 16",
        "gaps",
        "several lengths",
        "mixed",
        "chunks of 7",
        "lone",
        "recovers",
        "micro",
        "threads",
    ):
        assert kind in names
    for kind in ("copied", "trimmed", "state out and in"):
        assert kind in names


def test_a_file_that_is_no_model_is_a_wrong_configuration(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"Dear reader")
    done = verify("--model", file)
    assert done.returncode == 78
    assert "is not a GGUF file" in done.stderr
    assert verify("--model", tmp_path / "absent.gguf").returncode == 78


def test_the_tiled_kernel_left_on_makes_a_k_quant_inexact(quants: dict[str, str]) -> None:
    exact, detail, _ = self_test(quants["q4_k_m"])
    assert exact, detail
    exact, detail, _ = self_test(quants["q4_k_m"], tiled_kernels=True)
    assert not exact
    assert "tiled kernel" in detail


def test_repacked_weights_make_a_k_quant_inexact(quants: dict[str, str]) -> None:
    exact, detail, _ = self_test(quants["q4_k_m"], repacked_weights=True)
    assert not exact
    assert "repacked" in detail


def test_f16_is_exact_only_in_a_build_without_tiny_blas_and_says_so(quants: dict[str, str]) -> None:
    exact, detail, tiny_blas = self_test(quants["f16"])
    assert exact is not tiny_blas
    if tiny_blas:
        assert "F16 weights need a llama.cpp built with -DGGML_LLAMAFILE=OFF" in detail


def test_a_unified_kv_cache_is_inexact(model_path: Path) -> None:
    exact, detail, _ = self_test(model_path, unified_kv=True)
    assert not exact
    assert "unified" in detail


@pytest.mark.parametrize("kv_type", ["f16", "f32", "bf16", "q8_0", "q4_0"])
def test_every_type_of_kv_cache_can_be_exact(model_path: Path, kv_type: str) -> None:
    exact, detail, _ = self_test(model_path, kv_type=kv_type)
    assert exact, detail


@pytest.mark.parametrize("kv_type", ["f16", "f32"])
def test_flash_attention_that_sums_in_blocks_is_inexact(model_path: Path, kv_type: str) -> None:
    exact, detail, _ = self_test(model_path, kv_type=kv_type, flash_attention=True)
    assert not exact
    assert f"flash attention sums a KV cache of {kv_type} in blocks" in detail


def test_without_flash_attention_a_lone_row_is_inexact_unless_roles_are_kept(model_path: Path) -> None:
    """That roles are kept goes with the switches; an engine is made to think otherwise here. A cache of f16 shows it on
    every processor: where AVX2 is all there is, those of other types come out equal.
    """
    exact, detail, _ = self_test(model_path, kv_type="f16", flash_attention=False, roles=False)
    assert not exact
    assert "in chunks of (1, 7, 1, 32) differ" in detail


def test_seeded_draws_are_the_same_alone_and_among_others_that_are_cancelled(llama_node: RealNode) -> None:
    output = run(
        BENCHMARKS / "sampled_equality.py",
        *("--runtime-dir", llama_node.path, "--generations", 20, "--tokens", 16, "--at-once", 8, "--json"),
    )
    found = json.loads(output)
    assert (found["equal"], found["generations"], found["distinct"]) == (20, 20, 20)
    assert found["exact"]
    assert found["cancelled"] > 0
    assert found["occupancy_max"] > 1
    llama_node.wait_idle()
