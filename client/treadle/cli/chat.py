"""``treadle chat``: one answer, or a conversation line by line."""

from __future__ import annotations

import argparse
import sys

from treadle.cli import exits
from treadle.cli.generation import add_options, options_of, show, text_or_stdin
from treadle.client import Client

_PROMPT = "> "


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "message", metavar="MESSAGE", nargs="?", help="ask this and leave; - reads standard input; none: converse"
    )
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    add_options(parser)


def run(args: argparse.Namespace) -> int:
    """Answer once, or until the end of input. Ctrl-C ends an answer, and leaves where none runs."""
    history = [{"role": "system", "content": args.system}] if args.system else []
    with Client(args.runtime_dir) as client:
        if args.message is not None:
            _answer(client, history, text_or_stdin(args.message, "messages"), args)
            return exits.OK
        while (line := _read()) is not None:
            if line.strip():
                _turn(client, history, line, args)
    return exits.OK


def _turn(client: Client, history: list[dict[str, str]], line: str, args: argparse.Namespace) -> None:
    before = len(history)
    try:
        _answer(client, history, line, args)
    except KeyboardInterrupt:
        del history[before:]  # a question without an answer would confuse the next
        print(file=sys.stderr)


def _answer(client: Client, history: list[dict[str, str]], line: str, args: argparse.Namespace) -> None:
    history.append({"role": "user", "content": line})
    with client.chat(history, **options_of(args)) as session:
        history.append({"role": "assistant", "content": show(session, args)})


def _read() -> str | None:
    """The next line; None at the end of input."""
    try:
        return input(_PROMPT if sys.stdin.isatty() else "")
    except EOFError:
        return None
