"""Signals as something to poll: a handler only counts, the loop decides."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Final

ORPHANED: Final = signal.SIGUSR1
"""What a node's processes are sent when their supervisor died: nobody will start either of them again. It may come
more than once.
"""

_STOPPING: Final = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """Counts SIGTERM and SIGINT in the main thread while it is installed, and notes ORPHANED; ``fileno`` becomes
    readable with each.

    ``on_second`` is called, with the signal's number and inside the handler, by every SIGTERM and SIGINT after the
    first.
    """

    def __init__(self, on_second: Callable[[int], object] | None = None) -> None:
        self.count = 0
        self.orphaned = False
        self._on_second = on_second
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._wakeup_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, self._received) for number in _STOPPING}
        self._before[ORPHANED] = signal.signal(ORPHANED, self._left_alone)

    @property
    def asked(self) -> bool:
        """Whether somebody wants the process to end."""
        return self.count > 0

    def fileno(self) -> int:
        """A descriptor to poll for readability."""
        return self._reader

    def drain(self) -> None:
        """Empty the descriptor."""
        try:
            os.read(self._reader, 4096)
        except BlockingIOError:
            return

    def close(self) -> None:
        """Restore what was installed before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._reader)
        os.close(self._writer)

    def _received(self, number: int, _frame: FrameType | None) -> None:
        self.count += 1
        if self.count > 1 and self._on_second is not None:
            self._on_second(number)

    def _left_alone(self, _number: int, _frame: FrameType | None) -> None:
        self.orphaned = True
