"""CPU lists, and keeping a process on one."""

from __future__ import annotations

import os

import pytest

from treadle_shared.errors import ConfigError
from treadle_worker.pinning import parse_cpus, pin, usable_cpus


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0", {0}), ("0-3,5", {0, 1, 2, 3, 5}), ("7,2,2-3", {2, 3, 7}), ("4-4", {4})],
)
def test_a_list_of_numbers_and_ranges_is_read(text: str, cpus: set[int]) -> None:
    assert parse_cpus(text) == cpus


@pytest.mark.parametrize("text", ["3-1", "0-99999999999", "70000"])
def test_an_impossible_range_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse_cpus(text)
    assert refusal.value.key == "cpus"


def test_a_cpu_that_is_not_there_is_refused_and_nothing_changes() -> None:
    before = usable_cpus()
    with pytest.raises(ConfigError, match="cpus: CPU 65000"):
        pin("65000")
    assert usable_cpus() == before


def test_no_list_leaves_the_process_where_it_is() -> None:
    assert pin("") == frozenset(os.sched_getaffinity(0))


def test_every_thread_of_the_process_moves_to_the_list() -> None:
    everything = usable_cpus()
    child = os.fork()
    if child == 0:  # a process of its own, so that this one keeps its CPUs
        chosen = min(everything)
        pin(str(chosen))
        tasks = [int(task) for task in os.listdir("/proc/self/task")]
        os._exit(0 if all(os.sched_getaffinity(task) == {chosen} for task in tasks) else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert usable_cpus() == everything
