"""One process of a node under its supervisor."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Final

from treadle_shared.signals import ORPHANED

_TETHER: Final = str(Path(__file__).with_name("_tether.py"))
_MANAGER_VARIABLES: Final = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")  # addressed to the supervisor


class Child:
    """Starts a Python module with the node's arguments, again and again; tells of each death once.

    ``on_death(name, code)`` is called in a thread of its own. The child has a process group of its own, so that
    Ctrl-C in a terminal reaches the supervisor alone, and is sent ORPHANED when the thread that started it ends.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        on_death: Callable[[str, int], None],
        output: IO[bytes] | IO[str] | None = None,
    ) -> None:
        self.name = name
        self._arguments = list(arguments)
        self._on_death = on_death
        self._output = sys.stderr if output is None else output
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The process id while it runs."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    def start(self) -> None:
        """Start it; it must not be running."""
        assert self.pid is None, f"{self.name} is running"
        tether = [sys.executable, "-I", "-S", _TETHER, str(os.getpid()), str(int(ORPHANED))]
        process = subprocess.Popen(  # noqa: S603  (our own interpreter and modules, no shell)
            [*tether, sys.executable, *self._arguments],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            env=child_environment(os.environ),
            process_group=0,
        )
        self._process = process
        threading.Thread(target=self._wait, args=(process,), name=f"wait-{self.name}", daemon=True).start()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, where there is somebody to get it."""
        if self.pid is not None and self._process is not None:
            self._process.send_signal(number)

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        self._on_death(self.name, code)


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without settings: flags, variables and files are already one file in the runtime directory,
    and a variable read once more would win over a flag.
    """
    return {
        name: value
        for name, value in environ.items()
        if not name.startswith("TREADLE_") and name not in _MANAGER_VARIABLES
    }
