"""Where a worker stands with its broker. No sockets, no clock: events in, decisions out."""

from __future__ import annotations

from enum import Enum
from typing import Final

from treadle_shared.errors import EXIT_CONFIG

HELLO_EVERY_S: Final = 1.0  # a broker that starts later is found within this
UNHEARD_S: Final = 0.25  # the next try where no broker was there to hear it
BUSY_LIMIT_S: Final = 5.0  # how long a second worker waits at most between two tries
EXIT_FAILURE: Final = 1

_FINAL_REFUSALS: Final = {"version": EXIT_FAILURE, "recipe": EXIT_FAILURE, "tokenizer": EXIT_CONFIG}
"""Refusals that trying again cannot change, and the exit code of each."""


class Standing(Enum):
    """``OFFERING``: hello is repeated until somebody answers. ``SERVING``: a broker has welcomed this worker."""

    OFFERING = "offering"
    SERVING = "serving"


class Handshake:
    """Tells when hello is due, whose ticks count, and when to give up."""

    def __init__(self) -> None:
        self.standing = Standing.OFFERING
        self.broker_id = ""
        self._next_hello = 0.0
        self._patience = HELLO_EVERY_S

    def hello_due(self, now: float) -> bool:
        """Whether to say hello."""
        return self.standing is Standing.OFFERING and now >= self._next_hello

    def said_hello(self, now: float, heard: bool) -> None:
        """Hello was said; ``heard`` is False where there was no broker to send it to."""
        self._next_hello = now + (self._patience if heard else UNHEARD_S)

    @property
    def next_hello(self) -> float | None:
        """When hello is due; None while a broker is served."""
        return None if self.standing is Standing.SERVING else self._next_hello

    def welcomed(self, broker_id: str) -> None:
        """A broker takes this worker, which must now hold nothing. A second welcome means the same again."""
        self.standing = Standing.SERVING
        self.broker_id = broker_id
        self._patience = HELLO_EVERY_S

    def serves(self, broker_id: str) -> bool:
        """Whether this broker has welcomed the worker, and is not lost."""
        return self.standing is Standing.SERVING and broker_id == self.broker_id

    def lost(self, now: float) -> bool:
        """The broker is gone, or knows this worker no longer; True where it was served until now."""
        was_served = self.standing is Standing.SERVING
        self.standing = Standing.OFFERING
        self.broker_id = ""
        if was_served:
            self._next_hello = now
        return was_served

    def busy(self, now: float) -> None:
        """Another worker serves: try again, less and less often."""
        self._patience = min(2 * self._patience, BUSY_LIMIT_S)
        self._next_hello = now + self._patience

    def exit_code(self, reason: str) -> int | None:
        """The exit code of a refusal that no retry can change, else None."""
        return _FINAL_REFUSALS.get(reason)
