"""``python -m treadle_broker.sweep_main``: the sweep in one process, for ``treadle sweep --in-process``.

The engine comes from a factory named on the command line as ``module:function``, which is given the NodeConfig of
its level: this package knows no engine. Prints the whole ConcurrencySweep as JSON.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from treadle_broker.sweep import run_concurrency_sweep
from treadle_shared.concurrency import SweepPlan
from treadle_shared.config import NodeConfig, load_config
from treadle_shared.engine import BatchEngine
from treadle_shared.errors import EXIT_CONFIG, ConfigError, ModelError, WeightBudgetError
from treadle_shared.log import set_up_logging


def main(arguments: Sequence[str]) -> int:
    """Run the sweep; the exit code."""
    options = _parser().parse_args(arguments)
    set_up_logging("sweep", "warning")
    try:
        config = load_config(Path(options.config), environ={})
        plan = msgspec.json.decode(options.plan, type=SweepPlan)
        factory = _factory(options.engine_factory)
        sweep = run_concurrency_sweep(
            lambda level: factory(msgspec.structs.replace(config, max_sessions=level, cache_slots=0)),
            levels=plan.levels,
            jobs=plan.jobs,
            prompt_tokens=plan.prompt_tokens,
            new_tokens=plan.new_tokens,
            depth=config.tick_depth,
        )
    except (ConfigError, ModelError, WeightBudgetError) as error:
        print(error, file=sys.stderr)
        return EXIT_CONFIG
    sys.stdout.buffer.write(msgspec.json.encode(sweep))
    return 0


def _factory(name: str) -> Callable[[NodeConfig], BatchEngine]:
    module, _, function = name.partition(":")
    factory: Callable[[NodeConfig], BatchEngine] = getattr(importlib.import_module(module), function)
    return factory


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m treadle_broker.sweep_main")
    parser.add_argument("--config", required=True, help="TOML configuration file")
    parser.add_argument("--plan", required=True, help="a SweepPlan as JSON")
    parser.add_argument("--engine-factory", required=True, help="module:function that makes an engine of a NodeConfig")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
