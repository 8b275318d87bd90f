"""Starting the broker: configuration, the hold on the runtime directory, the tokenizer, then the service."""

from __future__ import annotations

import argparse
import os
import resource
from collections.abc import Sequence
from pathlib import Path

import zmq

from treadle_broker.service import Broker
from treadle_broker.text import ByteTokenizer, Tokenizer, VocabTokenizer
from treadle_broker.tick_log import open_tick_log
from treadle_shared.config import NodeConfig, read_node_config
from treadle_shared.errors import EXIT_CONFIG, ConfigError, ModelError, RuntimeDirError
from treadle_shared.log import get_logger, set_up_logging
from treadle_shared.modelfile import check_model
from treadle_shared.notify import Notifier
from treadle_shared.rundir import NodeLock, RuntimeDir, find_runtime_dir

_log = get_logger("broker")


def run(arguments: Sequence[str]) -> int:
    """Run a broker with command-line arguments; its exit code. 78 where a restart cannot help."""
    options = _parser().parse_args(arguments)
    set_up_logging("broker")
    try:
        directory = find_runtime_dir(options.runtime_dir)
        config = read_node_config(directory.path, options.config)
        set_up_logging("broker", config.log_level, config.log_format)
        return _serve(config, directory)
    except (ConfigError, ModelError, RuntimeDirError) as error:
        _log.error("refused_to_start", error=str(error))
        return EXIT_CONFIG


def _serve(config: NodeConfig, directory: RuntimeDir) -> int:
    directory.create()
    lock = NodeLock(directory)
    lock.acquire()  # before anything else: a second broker must not touch the first one's sockets
    _raise_descriptor_limit()
    os.umask(0o007 if directory.open_to_group else 0o077)  # sockets are as private as their directory
    try:
        tokenizer = _tokenizer(config)
        try:
            return _broker(config, directory, tokenizer).run()
        finally:
            tokenizer.close()
    finally:
        lock.release()


def _broker(config: NodeConfig, directory: RuntimeDir, tokenizer: Tokenizer) -> Broker:
    try:
        return Broker(config, directory, tokenizer, Notifier(), open_tick_log(config))
    except zmq.ZMQError as error:
        raise RuntimeDirError(f"{directory.path}: no socket can be opened there: {error}") from None


def _raise_descriptor_limit() -> None:
    """Each client is a descriptor, and ZeroMQ aborts the process where it gets none for a connection."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _tokenizer(config: NodeConfig) -> Tokenizer:
    if config.engine == "reference":
        return ByteTokenizer()
    if not config.model:
        raise ConfigError("model", "no model file is named")
    check_model(Path(config.model))  # the vocabulary of a file that is cut short can often be read
    return VocabTokenizer(config.model)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m treadle_broker", description="The broker of a Treadle node.")
    parser.add_argument("--runtime-dir", help="where the node lives")
    parser.add_argument("--config", help="TOML configuration file")
    return parser
