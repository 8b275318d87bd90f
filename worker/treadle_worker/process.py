"""From command line to exit code: read the configuration, pin the process, serve."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from treadle_shared.config import NODE_FILE, NodeConfig, load_config
from treadle_shared.errors import EXIT_CONFIG, RuntimeDirError
from treadle_shared.log import get_logger, set_up_logging
from treadle_shared.rundir import RuntimeDir
from treadle_worker.engines import START_ERRORS
from treadle_worker.pinning import pin
from treadle_worker.service import WorkerService


def main(arguments: Sequence[str]) -> int:
    """Run a worker until it is told to stop; its exit code. 78 means that a restart cannot help."""
    options = _parse(arguments)
    set_up_logging("worker")
    try:
        config = _read_config(options)
        set_up_logging("worker", config.log_level, config.log_format)
        directory = RuntimeDir(Path(options.runtime_dir))
        directory.create()
        pin(config.cpus)
        return WorkerService(config, directory).run()
    except (*START_ERRORS, RuntimeDirError) as error:
        get_logger("process").error("refused_to_start", message=str(error))
        return EXIT_CONFIG


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("treadle_worker", description="The process that owns a node's model.")
    parser.add_argument("--runtime-dir", required=True, help="the directory that the node lives in")
    parser.add_argument("--config", help=f"TOML file; by default {NODE_FILE} in the runtime directory, if there")
    return parser.parse_args(arguments)


def _read_config(options: argparse.Namespace) -> NodeConfig:
    """The named file, else what a supervisor left in the runtime directory; the environment on top."""
    default = Path(options.runtime_dir) / NODE_FILE
    file = Path(options.config) if options.config else (default if default.exists() else None)
    return load_config(file)
