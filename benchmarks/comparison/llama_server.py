"""llama-server, asked through its own completion endpoint."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

from comparison.http_driver import HOST, HttpDriver
from comparison.job import Job
from comparison.names import SPLIT, UNIFIED
from comparison.peers import Peers
from comparison.systems import Running, Setting, System, process, ready

_OK: Final = b" 200 "
_PROBE_S: Final = 1.0


class LlamaServer(System):
    """One llama-server with as many slots and as much context as the others have.

    ``unified``: all slots share one pool of KV cells, as by default; otherwise each has its own. Whatever the
    setting does not say stays at the server's defaults; only its prompt cache in host memory is off where no
    prompts share a beginning, since it would copy every finished prompt for nothing.
    """

    def __init__(self, peers: Peers, unified: bool) -> None:
        self.name = UNIFIED if unified else SPLIT
        self._unified = unified
        self._program = peers.server

    @asynccontextmanager
    async def run(self, setting: Setting) -> AsyncIterator[Running]:
        port = free_port()
        log = setting.scratch / f"{self.name.replace(' ', '-')}.log"
        async with process([str(self._program), *self._flags(setting, port)], log, setting.environ) as child:
            await ready(child, log, lambda: answers(port, "/health"), self.name)
            driver = HttpDriver(port, "/completion", _body, _tokens_of)
            yield Running(driver.ask, {"server": child.pid}, "server")

    def _flags(self, setting: Setting, port: int) -> list[str]:
        threads = str(setting.threads)
        return [
            *("--model", str(setting.model), "--host", HOST, "--port", str(port)),
            *("--parallel", str(setting.sessions), "--ctx-size", str(setting.sessions * setting.session_tokens)),
            *("--threads", threads, "--threads-batch", threads),
            "--kv-unified" if self._unified else "--no-kv-unified",
            *(() if setting.reuse else ("--cache-ram", "0")),
        ]


def _body(job: Job) -> dict[str, Any]:
    return {
        "prompt": job.prompt,
        "n_predict": job.new_tokens,
        "stream": True,
        "ignore_eos": True,
        "temperature": 0.0,
        "samplers": ["top_k"],  # greedy in the cheapest way it has
        "top_k": 1,
        "return_tokens": True,
    }


def _tokens_of(event: dict[str, Any]) -> list[int]:
    """The last event repeats what came where the answer was not streamed; in a stream its tokens are empty."""
    if "error" in event:
        raise ValueError(str(event["error"]))
    return [] if event.get("stop") else list(event.get("tokens", ()))


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


async def answers(port: int, path: str) -> bool:
    """Whether a server answers a GET with 200."""
    try:
        async with asyncio.timeout(_PROBE_S):
            reader, writer = await asyncio.open_connection(HOST, port)
            try:
                writer.write(f"GET {path} HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n\r\n".encode())
                return _OK in await reader.readline()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False
