"""When each child was last heard: a process can be there and yet do nothing (SIGSTOP, a swap storm, a deadlock)."""

from __future__ import annotations

from typing import Final

UNHEARD_S: Final = 5.0  # a worker sends heartbeats twice a second, a broker answers in milliseconds
NEWBORN_S: Final = 60.0  # until a child is first heard: interpreter and imports on a busy machine


class Hearing:
    """Knows by name when a child started and when it was heard."""

    def __init__(self) -> None:
        self._patience_ends: dict[str, float] = {}

    def started(self, name: str, now: float) -> None:
        """The child has been started."""
        self._patience_ends[name] = now + NEWBORN_S

    def heard(self, name: str, now: float) -> None:
        """It said something. One that was heard before is expected to go on."""
        self._patience_ends[name] = now + UNHEARD_S

    def excuse(self, name: str, now: float) -> None:
        """It could not have been heard just now."""
        self._patience_ends[name] = max(self._patience_ends.get(name, now), now + UNHEARD_S)

    def is_lost(self, name: str, now: float) -> bool:
        """Whether it has been silent for too long."""
        return now > self._patience_ends.get(name, now)
