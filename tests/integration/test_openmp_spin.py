"""The real libgomp under the real library: what its threads do between two batches, alone and in a crowd.

In processes of their own: libgomp reads its environment once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

PROBE = """
import ctypes, json, os, subprocess, sys, threading, time
from treadle_worker.llama.crowd import waiting
from treadle_worker.llama.library import load_library

before = dict(os.environ)
library = load_library()
assert dict(os.environ) == before, "children would take it for the operator's word"
library.computes_with(2)
region = library.ggml.GOMP_parallel
nothing = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p)
region.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]

def spun_s():
    '''What the other thread of a team computes while there is nothing to compute.'''
    tasks = set(os.listdir("/proc/self/task"))
    found = []
    def master():
        region(nothing, None, 2, 0)
        fresh = set(os.listdir("/proc/self/task")) - tasks - {str(threading.get_native_id())}
        helper = max(map(int, fresh))
        started = waiting(helper)  # None while the kernel has not accounted for any of its time
        before = started.ran_s if started else 0.0
        for _ in range(5):
            region(nothing, None, 2, 0)
            time.sleep(0.1)
        found.append(waiting(helper).ran_s - before)
    thread = threading.Thread(target=master)
    thread.start()
    thread.join()
    time.sleep(0.1)  # for its team to end
    return found[0]

def work_until(short):
    '''Whether it is short then, and the share of the time that this thread waited for a processor meanwhile.'''
    end, before = time.monotonic() + 60, waiting(threading.get_native_id())
    while library.spinning.short != short and time.monotonic() < end:
        library.working()
        for _ in range(100000): pass
    lately = waiting(threading.get_native_id()).since(before)
    return library.spinning.short, lately.waited_s / max(lately.wanted_s, 1e-9)

found = {"adapts": library.spinning is not None}
if library.spinning is not None:
    found["first"] = library.spinning.short, spun_s()
    library.spinning.lengthen()
    found["long"] = library.spinning.short, spun_s()
    library.spinning.shorten()
    found["short"] = library.spinning.short, spun_s()
    found["calm"] = work_until(False)
    library.spinning.lengthen()  # where it never became calm
    hogs = []
    try:
        for _ in range(3 * os.cpu_count()):
            hogs.append(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
        found["crowded"] = work_until(True)
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()
print(json.dumps(found))
"""

_UNSAID = {key: value for key, value in os.environ.items() if key not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}


def probe(**said: str) -> dict[str, Any]:
    command = [sys.executable, "-c", PROBE]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**_UNSAID, **said}, check=False)
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a team of two is more than one processor: always short")
def test_threads_spin_long_when_the_processors_are_theirs_and_sleep_soon_in_a_crowd() -> None:
    found = probe()
    if not found["adapts"]:
        pytest.skip("llama.cpp is built without libgomp here")
    (first, first_s), (long, long_s), (short, short_s) = found["first"], found["long"], found["short"]
    assert (first, long, short) == (True, False, True)
    assert long_s > 4 * first_s, "a new process spins long"
    assert long_s > 4 * short_s, "what was long cannot be made short again"
    short, waited = found["calm"]
    assert not short or waited > 0.05, "nobody else wanted the processors"
    short, _ = found["crowded"]
    assert short, "three times as many threads as processors went unseen"


@pytest.mark.parametrize(
    "said", [{"GOMP_SPINCOUNT": "500"}, {"OMP_WAIT_POLICY": "passive"}], ids=lambda said: min(said)
)
def test_what_the_environment_says_stands(said: dict[str, str]) -> None:
    assert probe(**said) == {"adapts": False}
