"""Treadle, as ``treadle serve`` runs it."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from comparison.names import TREADLE
from comparison.systems import Running, Setting, System, process, ready
from comparison.tick_account import TickAccount
from comparison.treadle_driver import TreadleDriver
from treadle import AsyncClient
from treadle.errors import TreadleError
from treadle_shared.config import NodeConfig

KEPT_EVENTS: Final = 1 << 14  # a tick makes three; the longest run has some 4,000


class Treadle(System):
    """A node of real processes in a runtime directory of its own, asked through one AsyncClient.

    ``options`` are settings that this variant runs with, beyond those of the run.
    """

    def __init__(self, name: str = TREADLE, engine: str = "llama", options: Mapping[str, Any] | None = None) -> None:
        self.name = name
        self._engine = engine
        self._options = dict(options or {})

    @asynccontextmanager
    async def run(self, setting: Setting) -> AsyncIterator[Running]:
        async with self.node(setting) as (_, running):
            yield running

    @asynccontextmanager
    async def node(self, setting: Setting) -> AsyncIterator[tuple[AsyncClient, Running]]:
        """As ``run``, with the client that asks."""
        with tempfile.TemporaryDirectory(prefix="treadle-bench-") as folder:
            directory = Path(folder) / "node"
            log = setting.scratch / f"{self.name.replace(' ', '-')}.log"
            flags = _flags({**self._settings(setting), **setting.options, **self._options})
            command = [sys.executable, "-m", "treadle.cli", "serve", "--runtime-dir", str(directory), *flags]
            async with process(command, log, setting.environ) as child:
                await ready(child, log, lambda: _is_ready(directory), self.name)
                async with AsyncClient(directory) as client:
                    pids = (await client.status())["pids"]
                    pids["supervisor"] = child.pid
                    yield client, Running(TreadleDriver(client).ask, pids, "worker", TickAccount(directory))

    def _settings(self, setting: Setting) -> dict[str, Any]:
        engine = {"model": setting.model, "numerics": setting.numerics, "threads": setting.threads}
        return {
            "engine": self._engine,
            **(engine if self._engine == "llama" else {}),
            "max_sessions": setting.sessions,
            "session_tokens": setting.session_tokens,
            "queue_depth": setting.queue_depth,
            "telemetry_replay": KEPT_EVENTS,
        }


def knows(key: str) -> bool:
    """Whether nodes of this version have such a setting."""
    return key in NodeConfig.__struct_fields__


def known(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those settings that nodes of this version have."""
    return {key: value for key, value in options.items() if knows(key)}


def _flags(settings: Mapping[str, Any]) -> list[str]:
    return [text for key, value in settings.items() for text in (f"--{key.replace('_', '-')}", str(value))]


async def _is_ready(directory: Path) -> bool:
    try:
        async with AsyncClient(directory, timeout=1.0) as client:
            return bool((await client.status())["ready"])
    except TreadleError:
        return False
