"""``treadle verify``: exit code 0 where a model's answers are proved not to depend on load, 1 where they do."""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
from typing import Final

from treadle.cli import exits
from treadle.supervise import with_model
from treadle_shared.config import NodeConfig, load_config
from treadle_shared.errors import ConfigError

_MODULE: Final = "treadle_worker.verify"
_PACKAGES: Final = ("numpy", "llama_cpp")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--model", metavar="FILE", help="the GGUF file; without one the demo model")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads; by default every usable CPU")
    parser.add_argument("--quick", action="store_true", help="short prompts alone: seconds instead of minutes")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")


def run(args: argparse.Namespace) -> int:
    """Run the proof in a process of its own, which has the node's packages."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError("engine", f"{', '.join(missing)} not installed; verify needs pip install 'treadle[node]'")
    code = subprocess.run(_command(args, _config(args))).returncode  # noqa: S603  (this interpreter, our own module)
    if code < 0:
        print(f"treadle: the proof was ended by signal {-code}", file=sys.stderr)
        return exits.SOFTWARE
    return code


def _config(args: argparse.Namespace) -> NodeConfig:
    flags = {"engine": "llama", "model": args.model, "threads": args.threads}
    return with_model(load_config(None, flags))


def _command(args: argparse.Namespace, config: NodeConfig) -> list[str]:
    command = [sys.executable, "-m", _MODULE, "--model", config.model]
    if config.threads is not None:
        command += ["--threads", str(config.threads)]
    command += ["--quick"] if args.quick else []
    return command + (["--json"] if args.json else [])
