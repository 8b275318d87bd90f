"""Ways to run the same jobs through an engine. Each returns its runs, whose slots are free again."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from treadle_shared.errors import DecodeFailed
from treadle_worker.verify.driver import Driver, Run
from treadle_worker.verify.jobs import Job
from treadle_worker.verify.steps import Step, Tally

_ORDER_SEED: Final = 5  # any fixed number


def alone(driver: Driver, jobs: Iterable[Job], chunk: int | None = None, slot: int = 0) -> list[Run]:
    """One after the other with nothing beside, prompts in chunks of at most ``chunk`` tokens."""
    runs = []
    for job in jobs:
        run = driver.open(job, slot)
        for size in driver.cut(len(job.prompt), chunk or len(job.prompt) + 2):
            driver.prefill([(run, size)])
        driver.decode_to_end([run])
        driver.close([run])
        runs.append(run)
    return runs


def together(driver: Driver, jobs: Sequence[Job], slots: Sequence[int]) -> list[Run]:
    """Every job in a slot, all decoding in one batch, rows in the order of the jobs."""
    runs = [driver.open(job, slot) for job, slot in zip(jobs, slots, strict=True)]
    for run in runs:
        driver.prefill_whole(run)
    driver.decode_to_end(runs)
    driver.close(runs)
    return runs


def scattered(driver: Driver, jobs: Sequence[Job], n_slots: int) -> list[Run]:
    """In slots with gaps between them, neither prompts nor rows in slot order, the order another in each batch."""
    order = random.Random(_ORDER_SEED)  # noqa: S311  (a fixed order, no secret)
    runs = [driver.open(job, slot) for job, slot in zip(jobs, order.sample(range(n_slots), len(jobs)), strict=True)]
    for run in runs:
        driver.prefill_whole(run)
    while live := [run for run in runs if not run.done]:
        driver.decode(order.sample(live, len(live)))
    driver.close(runs)
    return runs


def one_call(driver: Driver, jobs: Sequence[Job]) -> list[Run]:
    """Prompts of several lengths in one prefill."""
    runs = [driver.open(job, slot) for slot, job in enumerate(jobs)]
    driver.prefill([(run, len(run.job.prompt)) for run in runs])
    driver.decode_to_end(runs)
    driver.close(runs)
    return runs


def staggered(driver: Driver, jobs: Sequence[Job], n_slots: int, cap: int) -> list[Run]:
    """As a node does: each tick decodes whoever runs, then prefills one chunk of whoever is next.

    A slot is taken again as soon as its run is done.
    """
    waiting, free = deque(jobs), list(range(n_slots))
    filling: deque[tuple[Run, int]] = deque()
    live: list[Run] = []
    runs: list[Run] = []
    while waiting or filling or live:
        driver.decode(live)
        for run in [run for run in live if run.done]:
            live.remove(run)
            driver.close([run])
            free = sorted([*free, run.slot])
        if not filling and waiting and free:
            run = driver.open(waiting.popleft(), free.pop(0))
            filling.extend((run, size) for size in driver.cut(len(run.job.prompt), cap))
            runs.append(run)
        if filling:
            run, size = filling.popleft()
            driver.prefill([(run, size)])
            live += [run] if run.prefilled else []
    return runs


def recovered(driver: Driver, jobs: Sequence[Job], outputs: Mapping[Job, Sequence[Step]]) -> list[Run]:
    """Rebuilt in mid-stream: each prompt and a growing share of its tokens, then decoded on."""
    runs = []
    for number, job in enumerate(jobs):
        emitted = [step.token for step in outputs[job][: 1 + number % job.steps] if step.token is not None]
        runs.append(driver.open(job, number, emitted))
    for run in runs:
        driver.rebuild(run)
    driver.decode_to_end(runs)
    driver.close(runs)
    return runs


def lone_rows(driver: Driver, jobs: Iterable[Job]) -> list[Run]:
    """Prompts whose first token and last token run alone."""
    runs = []
    for job in jobs:
        run = driver.open(job, 0)
        for size in (1, len(job.prompt) - 2, 1):
            driver.prefill([(run, size)])
        driver.decode_to_end([run])
        driver.close([run])
        runs.append(run)
    return runs


def lone_rows_refused(driver: Driver, jobs: Iterable[Job], tally: Tally) -> None:
    """A chunk that leaves one prompt token over must not be run: the engine has to refuse the rest."""
    for job in jobs:
        tally.prompts += 1
        run = driver.open(job, 0)
        driver.prefill([(run, len(job.prompt) - 1)])
        try:
            driver.prefill([(run, 1)])
        except DecodeFailed:
            tally.record("")
        else:
            tally.record(f"{job.name}: the last token ran alone")
        driver.close([run])
