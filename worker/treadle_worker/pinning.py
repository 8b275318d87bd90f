"""Which CPUs this process may use, and keeping it on the chosen ones."""

from __future__ import annotations

import os
from pathlib import Path

from treadle_shared.errors import ConfigError

_TASKS = Path("/proc/self/task")
_CPU_LIMIT = 1 << 16  # far above any machine; bounds the set that a mistyped range would make


def usable_cpus() -> frozenset[int]:
    """The CPUs of this process's affinity mask."""
    return frozenset(os.sched_getaffinity(0))


def parse_cpus(text: str) -> frozenset[int]:
    """CPU numbers from a list such as ``0-3,5``. Raises ConfigError for a range that runs backwards."""
    cpus: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        low, high = int(first), int(last or first)
        if high < low:
            raise ConfigError("cpus", f"the range {part} runs backwards")
        if high >= _CPU_LIMIT:
            raise ConfigError("cpus", f"CPU {high} is not there")
        cpus.update(range(low, high + 1))
    return frozenset(cpus)


def pin(text: str) -> frozenset[int]:
    """Keep this process on the CPUs of a list and return them; an empty list changes nothing.

    Threads that libraries started while they were imported are moved too; later ones inherit the mask.
    Raises ConfigError for CPUs that this process may not use.
    """
    if not text:
        return usable_cpus()
    cpus = parse_cpus(text)
    absent = sorted(cpus - usable_cpus())
    if absent:
        raise ConfigError("cpus", f"CPU {absent[0]} is not there, or not allowed to this process")
    for task in _TASKS.iterdir():
        _pin_thread(int(task.name), cpus)
    return cpus


def _pin_thread(thread: int, cpus: frozenset[int]) -> None:
    try:
        os.sched_setaffinity(thread, cpus)
    except ProcessLookupError:  # it ended meanwhile
        return
