"""A node as ``treadle serve`` runs it, and the other commands beside it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from real_node import wait_for

from treadle import Client, Unavailable
from treadle.control import Control
from treadle_shared.rundir import RuntimeDir

TREADLE = (sys.executable, "-m", "treadle.cli")
RUN_S = 60.0


def environment() -> dict[str, str]:
    """This process's, without settings of a node."""
    return {name: value for name, value in os.environ.items() if not name.startswith("TREADLE_")}


def _hears_hangups() -> None:
    """Whoever runs the tests may ignore SIGHUP, and that is inherited."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


class ServedNode:
    """One ``treadle serve`` process. ``lines`` is what it has printed on standard output."""

    def __init__(self, path: Path, *flags: str) -> None:
        self.path = path
        self.directory = RuntimeDir(path)
        self.lines: list[str] = []
        self._errors = path.with_suffix(".err")
        command = [*TREADLE, "serve", "--runtime-dir", str(path), *flags]
        with self._errors.open("wb") as errors:
            self.process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment(),
                preexec_fn=_hears_hangups,
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_ready(self) -> ServedNode:
        """Return once the ready line is there."""
        wait_for(lambda: self.lines or self.process.poll() is not None, "the ready line", RUN_S)
        assert self.lines, f"serve left with {self.process.returncode}:\n{self.errors}"
        return self

    @property
    def errors(self) -> str:
        """Standard error of the supervisor and its children."""
        return self._errors.read_text(errors="replace")

    @property
    def said(self) -> list[str]:
        """The supervisor's own lines."""
        return [line for line in self.errors.splitlines() if line.startswith("treadle: ")]

    def client(self, **options: Any) -> Client:
        """A new client of this node."""
        return Client(self.path, **options)

    def status(self) -> dict[str, Any]:
        """The node's facts; none where its broker is away."""
        try:
            with Control(self.path, timeout=1.0) as control:
                return control.status()
        except Unavailable:
            return {"ready": False, "pids": {}}

    def pids(self) -> dict[str, int]:
        """The process ids of a node that has both processes; on a busy machine its broker may take a moment to tell."""

        def told() -> dict[str, int] | None:
            pids = self.status()["pids"]
            return pids if pids.get("worker") else None

        found: dict[str, int] = wait_for(told, "both processes are told")
        return found

    def ready_without(self, name: str, pid: int) -> dict[str, Any] | None:
        """The facts once the node is ready with another process in this one's place."""
        facts = self.status()
        return facts if facts["ready"] and facts["pids"][name] != pid else None

    def run(self, command: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run another command on this node."""
        return run(command, *arguments, "--runtime-dir", str(self.path), **options)

    def signal(self, number: signal.Signals) -> None:
        """Send the supervisor a signal."""
        self.process.send_signal(number)

    def wait(self) -> int:
        """The supervisor's exit code once it has left."""
        code = self.process.wait(RUN_S)
        self._reader.join(5.0)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code

    def stop(self) -> int:
        """SIGTERM, if it still runs, and its exit code."""
        if self.process.poll() is None:
            self.signal(signal.SIGTERM)
        return self.wait()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))


def run(command: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run one ``treadle`` command to its end."""
    return subprocess.run(
        [*TREADLE, command, *arguments], capture_output=True, text=True, timeout=RUN_S, env=environment(), **options
    )


def facts_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The JSON object that a command printed."""
    facts: dict[str, Any] = json.loads(done.stdout)
    return facts


def is_alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
