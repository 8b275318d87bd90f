"""Who may import whom, read from the source."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = {
    "treadle_shared": ROOT / "shared" / "treadle_shared",
    "treadle_broker": ROOT / "broker" / "treadle_broker",
    "treadle_worker": ROOT / "worker" / "treadle_worker",
    "treadle": ROOT / "client" / "treadle",
}
FOREIGN = {
    "treadle_shared": {"msgpack", "msgspec", "structlog"},
    "treadle_broker": {"jinja2", "llama_cpp", "msgpack", "msgspec", "zmq"},
    "treadle_worker": {"llama_cpp", "msgspec", "numpy", "structlog", "zmq"},
    "treadle": {"matplotlib", "msgpack", "msgspec", "rich", "zmq"},
}
"""What each package may use besides the standard library: its part of the dependencies."""

IMPURE = {"zmq", "time", "threading", "socket", "asyncio", "logging", "structlog", "numpy", "random", "os"}


def imports(tree: ast.AST) -> Iterator[str]:
    """Every module that an ``import`` anywhere in the tree names, in full."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            yield node.module


def top_level(tree: ast.Module) -> Iterator[str]:
    """The modules that are imported when this one is."""
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from imports(node)


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def modules(package: str) -> list[Path]:
    found = sorted(SOURCES[package].rglob("*.py"))
    assert found, f"{package} has no source"
    return found


def root_of(module: str) -> str:
    return module.partition(".")[0]


MODULES = [
    pytest.param(package, path, id=str(path.relative_to(ROOT))) for package in SOURCES for path in modules(package)
]


@pytest.mark.parametrize(("package", "path"), MODULES)
def test_a_package_imports_itself_what_is_shared_and_its_dependencies(package: str, path: Path) -> None:
    allowed = {package, "treadle_shared"} | FOREIGN[package] | sys.stdlib_module_names
    assert {root_of(module) for module in imports(parsed(path))} <= allowed


@pytest.mark.parametrize("path", modules("treadle_broker"), ids=lambda path: path.name)
def test_the_broker_needs_llama_cpp_only_once_a_model_is_opened(path: Path) -> None:
    assert "llama_cpp" not in {root_of(module) for module in top_level(parsed(path))}


def test_the_scheduler_knows_no_clock_no_socket_and_no_thread() -> None:
    """Nor does anything that it imports of this project."""
    waiting, seen = ["treadle_broker.scheduler"], set()
    while waiting:
        module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        found = set(imports(parsed(_file_of(module))))
        assert not {root_of(name) for name in found} & IMPURE, module
        waiting += [name for name in found if root_of(name) == "treadle_broker"]
    assert len(seen) > 1


def _file_of(module: str) -> Path:
    package, *names = module.split(".")
    path = SOURCES[package].joinpath(*names)
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
