"""One level of a sweep on a fresh node of real processes."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from treadle.cli.settle import settled_status
from treadle.cli.stopwatch import Stopwatch
from treadle.client import Client
from treadle.events import TextDelta
from treadle.session import Session
from treadle.supervise import BackgroundNode, prepare_node
from treadle_shared.concurrency import ConcurrencyResult, Percentiles, SweepPlan
from treadle_shared.errors import ConfigError
from treadle_shared.limits import MAX_REQUESTS


def measure_level(level: int, plan: SweepPlan, settings: Mapping[str, Any]) -> ConcurrencyResult:
    """Start a node with ``level`` slots, run every job, stop it. Raises ConfigError where it does not start."""
    if plan.jobs > MAX_REQUESTS:
        raise ConfigError("jobs", f"at most {MAX_REQUESTS} can be submitted together, not {plan.jobs}")
    with tempfile.TemporaryDirectory(prefix="treadle-sweep-") as folder:
        node = prepare_node(str(Path(folder) / "node"), None, {**settings, "max_sessions": level, "cache_slots": 0})
        log = Path(folder) / "node.log"
        with log.open("wb") as output, BackgroundNode(node, output, lambda line: None) as background:
            if background.wait_ready() is None:
                raise ConfigError("sweep", f"the node did not start: {_last_line(log)}")
            return _run_jobs(node.directory.path, level, plan)


def _run_jobs(directory: Path, level: int, plan: SweepPlan) -> ConcurrencyResult:
    with Client(directory) as client:
        n_vocab = client.model_info()["n_vocab"]
        requests = [_request(job, plan, n_vocab) for job in range(plan.jobs)]
        began = time.perf_counter()
        watches = [Stopwatch() for _ in requests]
        sessions = client.submit_many(requests)
        with ThreadPoolExecutor(len(sessions)) as threads:
            list(threads.map(_read, sessions, watches))
        wall_s = time.perf_counter() - began
        return _result(level, sessions, watches, wall_s, settled_status(client))


def _request(job: int, plan: SweepPlan, n_vocab: int) -> dict[str, Any]:
    return {
        "prompt": plan.prompt(job, n_vocab),
        "max_tokens": plan.new_tokens,
        "session_id": f"job-{job}",
        "seed": job,
        "ignore_eos": True,
    }


def _read(session: Session, watch: Stopwatch) -> None:
    for event in session.events():
        if isinstance(event, TextDelta):
            watch.came(len(event.tokens))


def _result(
    level: int, sessions: Sequence[Session], watches: Sequence[Stopwatch], wall_s: float, facts: dict[str, Any]
) -> ConcurrencyResult:
    seen = facts["telemetry"]
    rows = seen["prefill_tokens_total"] + seen["decode_tokens_total"]
    return ConcurrencyResult(
        concurrency=level,
        ticks=seen["ticks_total"],
        avg_occupancy=seen["batch_occupancy_avg"],
        max_occupancy=seen["batch_occupancy_max"],
        tokens_per_tick=rows / max(seen["ticks_total"], 1),
        peak_kv_bytes=facts["kv_bytes_peak"],
        kv_pressure=facts["kv_bytes_peak"] / seen["kv_budget_bytes"],
        tokens_per_s=sum(len(session.tokens) for session in sessions) / wall_s,
        ttft_ms=Percentiles.of([watch.first_token_s for watch in watches if watch.first_token_s is not None]),
        itl_ms=Percentiles.of([gap for watch in watches for gap in watch.between_tokens_s]),
        cache_misses=facts["cache_misses"],
        rejected_admissions=seen["rejected_total"],
        outputs={session.session_id: session.tokens for session in sessions},
    )


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return lines[-1] if lines else "it said nothing"
