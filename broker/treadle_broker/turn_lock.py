"""A lock that whoever waits gets next."""

from __future__ import annotations

import threading


class TurnLock:
    """Mutual exclusion, reentrant, in turn: a thread that takes it again and again lets those who wait go between.

    A plain lock goes to whoever asks first once it is free, and that is nearly always the thread that just gave it up.
    Here whoever waits holds the *turn*, and taking the lock needs the turn.
    """

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._held = threading.Lock()
        self._owner = 0
        self._depth = 0

    @property
    def contended(self) -> bool:
        """Whether somebody waits for it."""
        return self._turn.locked()

    def __enter__(self) -> None:
        """Wait for the turn, then for the lock; at once for the thread that has it."""
        me = threading.get_ident()
        if self._owner != me:
            with self._turn:
                self._held.acquire()
            self._owner = me
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        """Give it up when the outermost ``with`` ends."""
        self._depth -= 1
        if self._depth == 0:
            self._owner = 0
            self._held.release()
