"""``treadle sweep``: the same jobs at several levels of concurrency, each level on a fresh node."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from treadle.cli import exits
from treadle.cli.node_flags import add_node_flags, flags_of
from treadle.cli.node_sweep import measure_level
from treadle.cli.sweep_plot import check_plot, write_plot
from treadle.supervise import with_model
from treadle_shared.concurrency import ConcurrencySweep, SweepPlan
from treadle_shared.config import config_to_toml, load_config
from treadle_shared.errors import ConfigError

ENGINE_FACTORY: Final = "treadle_worker.engines:make_engine"
MIN_SESSION_TOKENS: Final = 8  # the least context that a node takes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    plan = SweepPlan()
    parser.add_argument(
        "--levels", type=_levels, default=plan.levels, metavar="N,N,…", help="sessions at once (1,2,4,8)"
    )
    parser.add_argument("--jobs", type=int, default=plan.jobs, metavar="N", help="generations at each level (8)")
    parser.add_argument("--prompt-tokens", type=int, default=plan.prompt_tokens, metavar="N", help="of each job (4)")
    parser.add_argument("--new-tokens", type=int, default=plan.new_tokens, metavar="N", help="of each job (8)")
    parser.add_argument("--depth", type=int, choices=(1, 2), default=2, help="ticks in flight (2)")
    parser.add_argument("--in-process", action="store_true", help="scheduler and engine alone, without sockets")
    parser.add_argument("--model-seed", type=int, default=0, metavar="N", help="of the reference engine's weights (0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw throughput, occupancy and ITL")
    add_node_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Exit code 0 where no level changed a job's tokens, none missed its cache and none was refused, else 1."""
    if args.plot is not None:
        check_plot(args.plot)
    plan = SweepPlan(levels=args.levels, jobs=args.jobs, prompt_tokens=args.prompt_tokens, new_tokens=args.new_tokens)
    settings = flags_of(args) | _settings(plan, args)
    sweep = _in_process(plan, settings) if args.in_process else _on_nodes(plan, settings)
    print(json.dumps(sweep.to_dict()) if args.json else sweep.table(), flush=True)
    if args.plot is not None:
        write_plot(sweep, args.plot)
    clean = sweep.corruption_free and not sweep.cache_misses and not sweep.rejected_admissions
    return exits.OK if clean else exits.FAILED


def _settings(plan: SweepPlan, args: argparse.Namespace) -> dict[str, Any]:
    """What the sweep fixes: one prompt a tick, room for every job, and nothing more than a job needs."""
    return {
        "session_tokens": max(MIN_SESSION_TOKENS, plan.prompt_tokens + plan.new_tokens),
        "queue_depth": plan.jobs,
        "queue_tokens": plan.jobs * plan.prompt_tokens,
        "max_prefill_tokens_per_tick": plan.prompt_tokens,
        "burst_prefill_tokens_per_tick": 0,
        "cache_slots": 0,
        "tick_depth": args.depth,
        "reference_seed": args.model_seed,
    }


def _on_nodes(plan: SweepPlan, settings: Mapping[str, Any]) -> ConcurrencySweep:
    """Broker and worker processes, a new pair for each level."""
    results = [measure_level(level, plan, settings) for level in plan.levels]
    alone = results[0] if plan.levels[0] == 1 else measure_level(1, plan, settings)
    return ConcurrencySweep(levels=results, baseline=alone.outputs)


def _in_process(plan: SweepPlan, settings: Mapping[str, Any]) -> ConcurrencySweep:
    """In one process of its own, which has the node's packages."""
    config = with_model(load_config(None, settings))
    with tempfile.TemporaryDirectory(prefix="treadle-sweep-") as folder:
        file = Path(folder) / "sweep.toml"
        file.write_text(config_to_toml(config))
        command = [sys.executable, "-m", "treadle_broker.sweep_main", "--config", str(file)]
        command += ["--plan", msgspec.json.encode(plan).decode(), "--engine-factory", ENGINE_FACTORY]
        done = subprocess.run(command, stdout=subprocess.PIPE)  # noqa: S603  (this interpreter, our own module)
    if done.returncode:
        raise ConfigError("sweep", f"the process ended with exit code {done.returncode}")
    return msgspec.json.decode(done.stdout, type=ConcurrencySweep)


def _levels(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))
