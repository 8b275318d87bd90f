"""A node of real processes in a private directory, and what tests ask of it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from treadle import Client
from treadle_shared.config import config_to_toml, load_config
from treadle_shared.rundir import RuntimeDir

READY_S = 60.0
EXIT_S = 20.0


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = 20.0) -> Any:
    """The condition's first true value. Raises AssertionError after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.01)
    raise AssertionError(f"not within {timeout_s} s: {what}")


class RealNode:
    """Broker and worker as ``treadle serve`` starts them, without the supervisor's restarts."""

    def __init__(self, **settings: Any) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="treadle-test-"))
        self.directory = RuntimeDir(self.path)
        self.config = load_config(environ={}, flags=settings)
        (self.path / "node.toml").write_text(config_to_toml(self.config))
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, *names: str) -> RealNode:
        """Start the named processes (both by default)."""
        for name in names or ("broker", "worker"):
            log = (self.path / f"{name}.log").open("ab")
            environment = {key: value for key, value in os.environ.items() if not key.startswith("TREADLE_")}
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", f"treadle_{name}", "--runtime-dir", str(self.path)],
                stdout=log,
                stderr=log,
                env=environment,
            )
            log.close()
        return self

    def wait_ready(self) -> RealNode:
        """Return once the node serves."""
        wait_for(self.directory.is_live, "the broker holds its directory", READY_S)
        with self.client(timeout=READY_S) as client:
            wait_for(lambda: self._alive() and client.status()["ready"], "the node is ready", READY_S)
        return self

    def client(self, **options: Any) -> Client:
        """A new client of this node."""
        return Client(self.path, **options)

    def telemetry(self) -> Mapping[str, Any]:
        """One snapshot."""
        with self.client() as client:
            return client.telemetry()

    def wait_idle(self) -> Mapping[str, Any]:
        """The snapshot in which nothing is live any more."""

        def idle() -> Mapping[str, Any] | None:
            seen = self.telemetry()
            return seen if not (seen["active_sessions"] or seen["queue_depth"] or seen["kv_bytes"]) else None

        found: Mapping[str, Any] = wait_for(idle, "no live session, queue or KV")
        return found

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """Send a signal to one process."""
        self.processes[name].send_signal(number)

    def log(self, name: str) -> str:
        """What a process has logged."""
        return (self.path / f"{name}.log").read_text(errors="replace")

    def stop(self) -> dict[str, int]:
        """SIGTERM to both, broker first; their exit codes."""
        codes = {}
        for name in ("broker", "worker"):
            process = self.processes.get(name)
            if process is None:
                continue
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.terminate()
            try:
                codes[name] = process.wait(EXIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                codes[name] = process.wait()
        return codes

    def remove(self) -> None:
        """Delete the directory."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _alive(self) -> bool:
        for name, process in self.processes.items():
            assert process.poll() is None, f"the {name} left with {process.returncode}:\n{self.log(name)}"
        return True
