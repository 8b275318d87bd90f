"""Looks at the node, often until it is ready and seldom afterwards, in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

from treadle.control import Control
from treadle_shared.errors import TreadleError
from treadle_shared.rundir import RuntimeDir

POLL_S: Final = 0.2  # a progress display that moves, at no cost worth speaking of
REST_S: Final = 1.0  # how soon a child that has stopped is noticed; a millisecond of work a second
CONNECT_S: Final = 1.0  # a broker that is just starting
ANSWER_S: Final = 2.0  # one that is there answers in milliseconds


class StatusWatch:
    """Asks for the node's status every POLL_S seconds while it looks, every REST_S while it rests; None stands for
    no answer.
    """

    def __init__(self, directory: RuntimeDir, on_status: Callable[[dict[str, Any] | None], None]) -> None:
        self._directory = directory
        self._on_status = on_status
        self._looks = threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="status-watch", daemon=True)
        self._thread.start()

    def look(self) -> None:
        """Something is about to change."""
        self._looks.set()

    def rest(self) -> None:
        """Nothing is expected to change."""
        self._looks.clear()

    def close(self) -> None:
        """End the thread."""
        self._over.set()
        self._looks.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                with Control(self._directory.path, timeout=CONNECT_S) as control:
                    self._follow(control)
            except TreadleError:
                self._on_status(None)
                self._pause()

    def _follow(self, control: Control) -> None:
        while not self._over.is_set():
            self._on_status(control.status(timeout=ANSWER_S))
            self._pause()

    def _pause(self) -> None:
        """Until the next look; a rest ends as soon as there is something to look at."""
        if self._looks.is_set():
            self._over.wait(POLL_S)
        else:
            self._looks.wait(REST_S)
