"""``treadle generate``: continue a prompt on standard output."""

from __future__ import annotations

import argparse

from treadle.cli import exits
from treadle.cli.generation import add_options, options_of, show, text_or_stdin
from treadle.client import Client


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("prompt", metavar="PROMPT", help="text to continue; - reads standard input")
    add_options(parser)


def run(args: argparse.Namespace) -> int:
    """Stream the continuation."""
    prompt = text_or_stdin(args.prompt, "prompt")
    with Client(args.runtime_dir) as client:
        show(client.generate(prompt, **options_of(args)), args)
    return exits.OK
