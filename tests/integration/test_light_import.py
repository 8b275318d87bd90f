"""Importing the client stays light."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = {"numpy", "llama_cpp", "structlog", "jinja2", "rich", "treadle_broker", "treadle_worker"}


def loaded_by(statement: str) -> set[str]:
    """Every module that a fresh interpreter has after ``statement``."""
    program = f"{statement}\nimport sys\nprint(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    return set(run.stdout.split())


@pytest.mark.parametrize("statement", ["import treadle", "import treadle.cli", "import treadle.control"])
def test_the_client_loads_nothing_of_a_node(statement: str) -> None:
    assert not loaded_by(statement) & HEAVY


def test_the_text_package_loads_llama_cpp_only_when_a_model_is_opened() -> None:
    assert "llama_cpp" not in loaded_by("import treadle_broker.text")


def test_the_shared_package_loads_no_socket_library() -> None:
    assert not loaded_by("import treadle_shared") & (HEAVY | {"zmq"})
