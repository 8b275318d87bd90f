"""What a Treadle node costs beside its model: with the reference engine, so that no model is in the way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from comparison.figure import Figure
from comparison.job import Job
from comparison.loads import closed_loop
from comparison.processes import cpu_times, peak_bytes, resident_bytes
from comparison.systems import Running, Setting
from comparison.trace import Trace
from comparison.treadle_system import Treadle
from treadle import AsyncClient

STREAMS: Final = 32
STREAM_PROMPT: Final = 32
STREAM_ANSWER: Final = 512
ROUNDS: Final = 2  # answers for each stream
QUEUED: Final = 1000
QUEUED_PROMPT: Final = 100
FIGURES: Final = (
    Figure("broker_and_client_ms_a_tick", "broker and client, ms CPU a tick", 3),
    Figure("broker_ms_a_tick", "broker", 3),
    Figure("client_ms_a_tick", "client", 3),
    Figure("tick_ms", "wall time of a tick, ms", 2),
    Figure("idle_percent", "idle node, % of a core", 2),
    Figure("idle_broker_percent", "idle broker", 2),
    Figure("idle_worker_percent", "idle worker", 2),
    Figure("idle_supervisor_percent", "idle supervisor", 2),
    Figure("queued", "requests that wait"),
    Figure("broker_queued_mib", "broker's memory meanwhile, MiB", 1),
    Figure("broker_peak_mib", "its peak", 1),
)
BYTES: Final = 256  # the engine's vocabulary, without what marks a beginning or an end
IDLE_S: Final = 20.0
SETTLE_S: Final = 2.0  # by then what a start leaves behind is done
FILL_S: Final = 60.0
_POLL_S: Final = 0.05
_MS: Final = 1000.0
_MIB: Final = 1 << 20


def setting(scratch: Path, environ: Mapping[str, str]) -> Setting:
    """The node that is measured."""
    return Setting(
        model=Path(),
        sessions=STREAMS,
        session_tokens=1024,
        threads=1,
        scratch=scratch,
        environ=environ,
        queue_depth=QUEUED,
    )


def measure_cost(node: Setting) -> dict[str, float]:
    """All figures of one fresh node: idle, with 32 streams on one client, and with 1,000 requests that wait."""
    return asyncio.run(_measure(node))


async def _measure(node: Setting) -> dict[str, float]:
    async with Treadle(engine="reference").node(node) as (client, running):
        await closed_loop(running.ask, _jobs(STREAMS, STREAM_PROMPT, 4), STREAMS)
        await asyncio.sleep(SETTLE_S)
        idle = await _idle(running)
        streaming = await _streaming(client, running, idle)
        queued = await _queued(client, running)
    return {name: round(value, 4) for name, value in (idle.figures() | streaming | queued).items()}


@dataclass(frozen=True, slots=True)
class _Idle:
    """CPU seconds a second of each process, and of the client's."""

    shares: dict[str, float]

    def figures(self) -> dict[str, float]:
        node = {f"idle_{name}_percent": 100 * share for name, share in self.shares.items() if name != "client"}
        return node | {"idle_percent": sum(node.values())}


async def _idle(running: Running) -> _Idle:
    before, began = _spent(running), time.perf_counter()
    await asyncio.sleep(IDLE_S)
    wall_s = time.perf_counter() - began
    return _Idle({name: (now - before[name]) / wall_s for name, now in _spent(running).items()})


async def _streaming(client: AsyncClient, running: Running, idle: _Idle) -> dict[str, float]:
    """CPU a tick above idle; ``tick_ms`` is the wall time of one."""
    ticks = (await client.telemetry())["ticks_total"]
    before, began = _spent(running), time.perf_counter()
    await closed_loop(running.ask, _jobs(STREAMS * ROUNDS, STREAM_PROMPT, STREAM_ANSWER), STREAMS)
    wall_s = time.perf_counter() - began
    spent = {name: now - before[name] - idle.shares[name] * wall_s for name, now in _spent(running).items()}
    ticks = (await client.telemetry())["ticks_total"] - ticks
    a_tick = {name: _MS * seconds / ticks for name, seconds in spent.items()}
    return {
        "broker_ms_a_tick": a_tick["broker"],
        "client_ms_a_tick": a_tick["client"],
        "broker_and_client_ms_a_tick": a_tick["broker"] + a_tick["client"],
        "tick_ms": _MS * wall_s / ticks,
        "ticks": ticks,
    }


async def _queued(client: AsyncClient, running: Running) -> dict[str, float]:
    """The broker's memory while every slot is taken and 1,000 requests wait."""
    jobs = _jobs(STREAMS + QUEUED, QUEUED_PROMPT, STREAM_ANSWER)
    tasks = [asyncio.create_task(running.ask(job, Trace(time.perf_counter()))) for job in jobs]
    try:
        deepest = await _deepest_queue(client)
        resident = resident_bytes(running.pids["broker"])
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return {
        "queued": deepest,
        "broker_queued_mib": resident / _MIB,
        "broker_peak_mib": peak_bytes(running.pids["broker"]) / _MIB,
    }


async def _deepest_queue(client: AsyncClient) -> int:
    """The queue's depth once it is full, or has stopped growing."""
    deadline, depth = time.monotonic() + FILL_S, 0
    while depth < QUEUED and time.monotonic() < deadline:
        await asyncio.sleep(_POLL_S)
        now = (await client.telemetry())["queue_depth"]
        if now < depth:
            break
        depth = now
    return depth


def _spent(running: Running) -> dict[str, float]:
    """CPU seconds so far; the client is this process."""
    return {name: cpu_times(pid).total_s for name, pid in running.pids.items()} | {"client": time.process_time()}


def _jobs(count: int, prompt_tokens: int, new_tokens: int) -> Iterator[Job]:
    for number in range(count):
        yield Job(tuple((7 * number + place) % BYTES for place in range(prompt_tokens)), new_tokens)
