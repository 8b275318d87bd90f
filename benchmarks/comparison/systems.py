"""The systems that are compared: how each is started, asked and stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from comparison.errors import BenchmarkError
from comparison.job import Ask

START_S: Final = 120.0  # a model of a gigabyte loads from a cold disk in this time
STOP_S: Final = 20.0
_POLL_S: Final = 0.02

Child = subprocess.Popen[bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What every system gets alike. ``session_tokens``: what one session may hold, prompt and answer together.

    ``reuse``: prompts share beginnings, so caches of them are worth having. ``queue_depth`` and ``options`` are
    for systems that know such a thing. ``scratch``: a folder for logs and sockets. ``environ``: the processes'
    environment.
    """

    model: Path
    sessions: int
    session_tokens: int
    threads: int
    scratch: Path
    environ: Mapping[str, str]
    numerics: str = "exact"
    reuse: bool = False
    queue_depth: int = 1024
    options: Mapping[str, Any] = field(default_factory=dict)


class Account:
    """What a system tells of its own work, beside what is seen of it from outside: nothing, unless it can."""

    def begin(self) -> None:
        """What was before this does not count."""

    def figures(self) -> dict[str, float]:
        """What has been since."""
        return {}


@dataclass(frozen=True, slots=True)
class Running:
    """A started system: how to ask it, and its processes by name; ``model`` is the one that computes."""

    ask: Ask
    pids: Mapping[str, int]
    model: str
    account: Account = field(default_factory=Account)


class System(ABC):
    """One system in one configuration."""

    name: str

    @abstractmethod
    def run(self, setting: Setting) -> AbstractAsyncContextManager[Running]:
        """Start it, and stop it when the block is left. Raises BenchmarkError where it does not start."""


def environment() -> dict[str, str]:
    """This process's as it was started, without settings of a node. (The engine's library, once loaded, sets some.)"""
    return {name: value for name, value in os.environ.items() if not name.startswith("TREADLE_")}


@asynccontextmanager
async def process(command: Sequence[str], log: Path, environ: Mapping[str, str]) -> AsyncIterator[Child]:
    """A child that logs into a file, ended by SIGINT and, if it must be, SIGKILL."""
    with log.open("wb") as output:
        child = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=dict(environ))
    try:
        yield child
    finally:
        await _ended(child)


async def ready(child: Child, log: Path, probe: Callable[[], Awaitable[bool]], name: str) -> None:
    """Wait until ``await probe()`` is true. Raises BenchmarkError where the child ends, or is not ready in time."""
    try:
        async with asyncio.timeout(START_S):
            while not await probe():
                if child.poll() is not None:
                    raise BenchmarkError(f"{name} left with code {child.returncode}: {last_lines(log)}")
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise BenchmarkError(f"{name} was not ready in {START_S:g} s: {last_lines(log)}") from None


def last_lines(log: Path) -> str:
    """What a process said last."""
    lines = log.read_text(errors="replace").splitlines()
    return " / ".join(lines[-3:]) or "it said nothing"


async def _ended(child: Child) -> None:
    if child.poll() is None:
        child.send_signal(signal.SIGINT)
    try:
        await asyncio.to_thread(child.wait, STOP_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
