"""Watches the engine thread for the service manager, and ends the process when the thread is stuck."""

from __future__ import annotations

import os
from typing import Final, NoReturn

from treadle_shared.log import get_logger
from treadle_shared.notify import Notifier
from treadle_worker.status import WorkerStatus

EXIT_STUCK: Final = 70  # EX_SOFTWARE: the engine does not come back; a supervisor starts a new worker
_START_PATIENCE_S: Final = 30.0  # asked of the service manager with each heartbeat while the model loads


class Watch:
    """Tells the service manager how the worker stands (sd_notify(3)), the watchdog only while the engine is idle
    or its running tick is younger than ``tick_timeout_s``. An older tick ends the process with EXIT_STUCK:
    a call into the engine that does not return can be ended by nothing less.
    """

    def __init__(self, status: WorkerStatus, tick_timeout_s: float) -> None:
        self._status = status
        self._tick_timeout_s = tick_timeout_s
        self._notifier = Notifier()
        self._ready = False
        self._next = 0.0

    @property
    def next_turn(self) -> float:
        """When ``keep`` must be called; infinity where no watchdog waits."""
        return self._next if self._ready and self._notifier.watchdog_s is not None else float("inf")

    def starting(self) -> None:
        """The model loads: say how far, and ask for more time."""
        self._notifier.status(f"{self._status.phase}: {self._status.load:.0%}", _START_PATIENCE_S)

    def ready(self, text: str) -> None:
        """The engine has run its first decode."""
        self._ready = True
        self._notifier.ready(text)

    def stopping(self) -> None:
        """The worker was told to stop."""
        self._notifier.stopping("finishing the running tick")

    def keep(self, now: float) -> None:
        """Feed the watchdog when it is due, or leave with a stuck engine."""
        if self._status.tick_age(now) > self._tick_timeout_s:
            self._give_up(now)
        period = self._notifier.watchdog_s
        if self._ready and period is not None and now >= self._next:
            self._next = now + period
            self._notifier.watchdog()

    def close(self) -> None:
        """Close the notification socket."""
        self._notifier.close()

    def _give_up(self, now: float) -> NoReturn:
        age, limit = round(self._status.tick_age(now), 3), self._tick_timeout_s
        get_logger("worker").error("tick_timeout", tick_age_s=age, limit_s=limit)
        os._exit(EXIT_STUCK)
