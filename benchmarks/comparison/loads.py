"""How requests reach a system: in closed loops, at given times, in conversations."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import deque
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from typing import Any, Final

from comparison.job import Ask, Job
from comparison.trace import Trace

RUN_S: Final = 300.0  # a closed loop that takes longer is stuck, or far too long for a suite


async def closed_loop(ask: Ask, jobs: Iterable[Job], sessions: int) -> list[Trace]:
    """So many callers, each sending its next request when its last has ended, until no job is left."""
    left, traces = deque(jobs), list[Trace]()

    async def caller() -> None:
        while left:
            await _asked(ask, left.popleft(), traces)

    await _within(RUN_S, [caller() for _ in range(sessions)])
    return traces


async def open_loop(ask: Ask, jobs: Sequence[Job], arrivals_s: Sequence[float], patience_s: float) -> list[Trace]:
    """Each request at its own time, whatever became of those before; what has not ended ``patience_s`` seconds after
    the last arrival is given up.
    """
    traces: list[Trace] = []
    began = time.perf_counter()
    timed = [_asked_at(ask, job, began + after_s, traces) for job, after_s in zip(jobs, arrivals_s, strict=True)]
    await _within(arrivals_s[-1] + patience_s, timed)
    return traces


async def long_among_streams(
    ask: Ask, streams: Iterator[Job], longs: Sequence[Job], sessions: int, every_s: float
) -> list[Trace]:
    """Streams that go on without end, and a long prompt every so often; all stop when the last long one has ended.

    Streams begin one after another, so that they do not end together.
    """
    traces: list[Trace] = []
    began = time.perf_counter()

    async def stream(number: int) -> None:
        await asyncio.sleep(number * every_s / sessions)
        while True:
            await _asked(ask, next(streams), traces)

    background = [asyncio.create_task(stream(number)) for number in range(sessions)]
    first = 2 * every_s  # by then every stream runs
    timed = [_asked_at(ask, job, began + first + number * every_s, traces) for number, job in enumerate(longs)]
    try:
        await _within(RUN_S, timed)
    finally:
        await _cancelled(background)
    return traces


async def conversations(
    ask: Ask, openings: Sequence[Sequence[int]], questions: Sequence[Sequence[Sequence[int]]], new_tokens: int
) -> list[Trace]:
    """Several conversations at once; each turn's prompt is all that was said before, and a new question.

    A conversation's first prompt is its opening and its first question. Traces are grouped ``turn 1``, ….
    """
    traces: list[Trace] = []

    async def converse(opening: Sequence[int], asked: Sequence[Sequence[int]]) -> None:
        said = list(opening)
        for turn, question in enumerate(asked, start=1):
            said += question
            trace = await _asked(ask, Job(tuple(said), new_tokens, f"turn {turn}"), traces)
            said += trace.tokens

    await _within(RUN_S, [converse(*pair) for pair in zip(openings, questions, strict=True)])
    return traces


def poisson_arrivals(rate_per_s: float, seconds: float, chance: random.Random) -> list[float]:
    """Times in [0, ``seconds``) at which independent requests come; at least one."""
    gaps = (chance.expovariate(rate_per_s) for _ in itertools.count())
    times = list(itertools.takewhile(lambda when: when < seconds, itertools.accumulate(gaps)))
    return times or [0.0]


async def _asked(ask: Ask, job: Job, traces: list[Trace]) -> Trace:
    trace = Trace(time.perf_counter(), job.group)
    traces.append(trace)
    await ask(job, trace)
    return trace


async def _asked_at(ask: Ask, job: Job, due: float, traces: list[Trace]) -> None:
    await asyncio.sleep(max(due - time.perf_counter(), 0.0))
    trace = Trace(due, job.group)
    traces.append(trace)
    await ask(job, trace)


async def _within(timeout_s: float, work: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run all together; what is left after ``timeout_s`` is given up. Raises the first error."""
    tasks = [asyncio.create_task(part) for part in work]
    try:
        done, _ = await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        await _cancelled(tasks)


async def _cancelled(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
