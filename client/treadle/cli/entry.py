"""One parser, one module for each command, one place where errors become exit codes."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Any, Final, NoReturn, Protocol, cast

from treadle.cli import exits
from treadle_shared.errors import TreadleError

COMMANDS: Final = {
    "serve": "start a node and keep it running",
    "generate": "continue a prompt",
    "chat": "talk to the model",
    "status": "how a node stands",
    "tail": "follow a node's telemetry as JSON lines",
    "sessions": "what waits and runs on a node",
    "cancel": "end one session",
    "drain": "finish what runs, then stop the node",
    "sweep": "the same jobs at several levels of concurrency",
    "replay": "make the decisions of a tick log again and say where they would differ",
    "verify": "prove that a model's answers do not depend on load",
    "demo": "start a node, stream eight answers at once, and sum up",
}


class Command(Protocol):
    """What every command's module offers."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the command's own arguments."""

    def run(self, args: argparse.Namespace) -> int:
        """Do it; the exit code. TreadleErrors may leave."""
        ...


class _Parser(argparse.ArgumentParser):
    """Flags are written out; argument errors leave with EX_USAGE and one line."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        self.exit(exits.USAGE, f"{self.prog}: {message} (see `{self.prog} --help`)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    args = _parsed(words)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character must not end the stream
    try:
        return _flushed(args.command.run(args))
    except BrokenPipeError:
        return _reader_gone()
    except KeyboardInterrupt:
        return exits.INTERRUPTED
    except TreadleError as error:
        sys.stderr.write(f"treadle: {one_line(error)}\n")
        return exits.exit_code(error)


def _parsed(words: Sequence[str]) -> argparse.Namespace:
    """The arguments; one behind a command that does not know it is that command's error."""
    parser = make_parser(words)
    args, unknown = parser.parse_known_args(words)
    if unknown:
        asked = args.parser if words[0] in COMMANDS else parser
        asked.error(f"unrecognized arguments: {' '.join(' '.join(unknown).split())}")
    return args


def make_parser(words: Sequence[str] = ()) -> argparse.ArgumentParser:
    """The parser of all commands; of the one that ``words`` begin with alone, where they begin with one."""
    parser = _Parser(prog="treadle", description="Serve many LLM sessions at once from one GGUF model.")
    parser.add_argument("--version", action="version", version=f"treadle {_version()}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=_Parser)
    asked = [words[0]] if words and words[0] in COMMANDS else list(COMMANDS)
    for name in asked:
        summary = COMMANDS[name]
        command = cast(Command, importlib.import_module(f"treadle.cli.{name}"))
        sub = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        sub.add_argument("--runtime-dir", metavar="DIR", help="the node's runtime directory")
        command.add_arguments(sub)
        sub.set_defaults(command=command, parser=sub)
    return parser


def _version() -> str:
    try:
        return metadata.version("treadle")
    except metadata.PackageNotFoundError:  # run from a source tree that is not installed
        return "unknown"


def one_line(error: BaseException) -> str:
    """An error's sentence without line breaks."""
    return " ".join(str(error).split())


def _flushed(code: int) -> int:
    sys.stdout.flush()
    return code


def _reader_gone() -> int:
    """The reader of our output has left (``| head``): what is buffered has nowhere to go."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return exits.PIPE
