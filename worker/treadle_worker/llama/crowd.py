"""Whether others want the processors that a batch runs on."""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

_TASKS: Final = Path("/proc/self/task")
_NS: Final = 1e-9

_CROWDED: Final = 0.25
"""Of the time that the thread could have run, what it waited for a processor. Broker and clients of one node make it
wait for 1 to 7 % on two processors, a second node for half."""
_CALM: Final = 0.10
_CALM_AT_FIRST_S: Final = 0.4
_CALM_AGAIN_S: Final = 2.0  # a neighbour that was seen, and comes and goes, counts as there
_LEAST_S: Final = 0.02  # less than this tells nothing


class Waiting(NamedTuple):
    """The kernel's account of one thread, in seconds since it was started: how long it ran, and how long it waited for
    a processor while it could have run (schedstat, Documentation/scheduler/sched-stats.rst in Linux).
    """

    ran_s: float
    waited_s: float

    def since(self, earlier: Waiting) -> Waiting:
        """What came after ``earlier``."""
        return Waiting(self.ran_s - earlier.ran_s, self.waited_s - earlier.waited_s)

    @property
    def wanted_s(self) -> float:
        """How long the thread had something to do."""
        return self.ran_s + self.waited_s


def waiting(thread: int) -> Waiting | None:
    """The account of a thread of this process, by its native id.

    None where the kernel keeps none (the file is missing, or says that the thread never ran), and once it has ended.
    """
    try:
        ran, waited, _ = map(int, (_TASKS / str(thread) / "schedstat").read_text().split())
    except (OSError, ValueError):
        return None
    return Waiting(ran * _NS, waited * _NS) if ran else None


class Crowd:
    """Follows a computing thread. ``here`` is true at first, once the thread had to wait much, and until it has had
    something to do for a while and hardly waited: a short while at first, a longer one after a crowd.
    """

    def __init__(self) -> None:
        self.here = True
        self._calm_s = 0.0
        self._patience_s = _CALM_AT_FIRST_S

    def saw(self, lately: Waiting) -> bool:
        """Take what the thread did lately, and return ``here``."""
        if lately.wanted_s < _LEAST_S:
            return self.here
        share = lately.waited_s / lately.wanted_s
        self._calm_s = self._calm_s + lately.wanted_s if share < _CALM else 0.0
        if share >= _CROWDED:
            self.here = True
            self._patience_s = _CALM_AGAIN_S
        elif self._calm_s >= self._patience_s:
            self.here = False
        return self.here
