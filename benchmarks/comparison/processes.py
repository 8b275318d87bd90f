"""What processes cost, read from /proc (Linux)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_TICK_S: Final = 1.0 / os.sysconf("SC_CLK_TCK")
_KIB: Final = 1024
_UTIME, _STIME = 11, 12  # places in /proc/PID/stat after the parenthesised name


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """CPU seconds of one process: in all, and of each living thread."""

    total_s: float
    threads_s: dict[int, float]

    def since(self, earlier: CpuTimes) -> CpuTimes:
        """What came to it since."""
        threads = {tid: spent - earlier.threads_s.get(tid, 0.0) for tid, spent in self.threads_s.items()}
        return CpuTimes(self.total_s - earlier.total_s, threads)

    def outside_model(self, model_threads: int) -> float:
        """CPU seconds of all but the busiest threads, as many as compute the model."""
        busiest = sorted(self.threads_s.values(), reverse=True)[:model_threads]
        return max(self.total_s - sum(busiest), 0.0)


def cpu_times(pid: int) -> CpuTimes:
    """A process's CPU times so far; its ended threads are in the total. Raises ProcessLookupError."""
    threads = {}
    try:
        total = _seconds(Path(f"/proc/{pid}/stat").read_text())
        for task in Path(f"/proc/{pid}/task").iterdir():
            threads[int(task.name)] = _task_seconds(task)
    except FileNotFoundError:
        raise ProcessLookupError(f"process {pid} is gone") from None
    return CpuTimes(total, threads)


def peak_bytes(pid: int) -> int:
    """The most memory that a process ever had resident. Raises ProcessLookupError."""
    return _status_bytes(pid, "VmHWM")


def resident_bytes(pid: int) -> int:
    """The memory that a process has resident now. Raises ProcessLookupError."""
    return _status_bytes(pid, "VmRSS")


def _status_bytes(pid: int, field: str) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except FileNotFoundError:
        raise ProcessLookupError(f"process {pid} is gone") from None
    found = next((line for line in lines if line.startswith(f"{field}:")), f"{field}: 0 kB")
    return int(found.split()[1]) * _KIB


def _task_seconds(task: Path) -> float:
    """A thread's; one that ends just now counts in the process's total alone."""
    try:
        return _seconds((task / "stat").read_text())
    except (FileNotFoundError, ProcessLookupError):
        return 0.0


def _seconds(stat: str) -> float:
    fields = stat.rpartition(")")[2].split()
    return (int(fields[_UTIME]) + int(fields[_STIME])) * _TICK_S
