"""One thread wakes another that waits on descriptors."""

from __future__ import annotations

import os


class Bell:
    """``fileno`` is readable from ``ring`` until ``hush``; any thread may ring, any number of times."""

    def __init__(self) -> None:
        self._counter = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """A descriptor to poll for readability."""
        return self._counter

    def ring(self) -> None:
        """Wake whoever waits."""
        os.eventfd_write(self._counter, 1)

    def hush(self) -> None:
        """Whoever was woken has seen to it: ring anew for what comes now."""
        try:
            os.eventfd_read(self._counter)
        except BlockingIOError:  # nobody rang
            return

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self._counter)
