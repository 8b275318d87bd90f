"""Signals that end a process: the first asks, the second does not wait."""

from __future__ import annotations

import os
import signal
import socket
from types import FrameType
from typing import Final

_ENDING: Final = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """Catches SIGTERM and SIGINT in the main thread. ``fileno`` becomes readable when one arrives, so a
    poller wakes; ``asked`` is then True. The second one ends the process at once.
    """

    def __init__(self) -> None:
        self.asked = False
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._old_wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._old = {number: signal.signal(number, self._receive) for number in _ENDING}

    def fileno(self) -> int:
        """What to poll."""
        return self._reader.fileno()

    def drain(self) -> None:
        """Empty what made ``fileno`` readable."""
        try:
            self._reader.recv(4096)
        except BlockingIOError:
            return

    def close(self) -> None:
        """Put the old handlers back."""
        for number, handler in self._old.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_wakeup)
        self._reader.close()
        self._writer.close()

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        if self.asked:
            os._exit(128 + number)
        self.asked = True
