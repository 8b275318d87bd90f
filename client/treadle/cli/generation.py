"""The options of ``generate`` and ``chat``."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any, Final

import msgspec

from treadle.cli.board import printable
from treadle.errors import InvalidRequest
from treadle.session import Session

_NUMBERS: Final = (
    ("--max-tokens", int, "most tokens of the answer (default: the node's)"),
    ("--temperature", float, "0 is greedy (default: 0)"),
    ("--top-k", int, "keep the k likeliest tokens; 0 is off"),
    ("--top-p", float, "keep the likeliest tokens that sum to p; 1 is off"),
    ("--min-p", float, "drop tokens less likely than p times the likeliest; 0 is off"),
    ("--repeat-penalty", float, "divide the logits of tokens seen lately; 1 is off"),
    ("--seed", int, "repeat a sampled answer"),
    ("--logprobs", int, "with --json: log probabilities of each token and of the n likeliest"),
    ("--priority", int, "higher goes first, between -100 and 100"),
    ("--queue-timeout-s", float, "seconds to wait in the queue"),
    ("--deadline-s", float, "seconds for everything"),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of a generation."""
    for flag, kind, text in _NUMBERS:
        parser.add_argument(flag, type=kind, metavar=flag.rsplit("-", 1)[-1].upper(), help=text)
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be repeated")
    parser.add_argument("--session-id", metavar="ID", help="name the session")
    parser.add_argument("--cache-salt", metavar="TEXT", help="share prefixes only with requests of the same salt")
    parser.add_argument("--ignore-eos", action="store_true", default=None, help="go on to --max-tokens")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the text")


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """The options that were given, as the client takes them. Raises InvalidRequest for one that would show nothing."""
    if args.logprobs is not None and not args.json:
        raise InvalidRequest("logprobs", "is printed with --json only")
    names = [flag.removeprefix("--").replace("-", "_") for flag, _, _ in _NUMBERS]
    names += ["stop", "session_id", "cache_salt", "ignore_eos"]
    return {name: value for name in names if (value := getattr(args, name)) is not None}


def text_or_stdin(text: str, field: str) -> str:
    """The argument, or standard input where it is ``-``. Raises InvalidRequest where that is not UTF-8."""
    if text != "-":
        return text
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(field, f"standard input is not UTF-8 (byte {error.start})") from None


def show(session: Session, args: argparse.Namespace) -> str:
    """Print an answer as it comes, or its facts at the end; returns its text. That it was cut is said on standard
    error, but for a script that asked for the length.
    """
    if args.json:
        text = session.result()
        print(json.dumps(facts_of(session)), flush=True)
        return text
    cleaned = printable if sys.stdout.isatty() else str
    last = ""
    try:
        for last in session:
            print(cleaned(last), end="", flush=True)
    finally:  # also where it breaks off: what is said of that begins a line of its own
        if not last.endswith("\n"):
            print(flush=True)
    if session.finish_reason == "length" and (args.max_tokens is None or sys.stderr.isatty()):
        print(f"(cut after {len(session.tokens)} tokens; --max-tokens allows more)", file=sys.stderr)
    return session.text


def facts_of(session: Session) -> dict[str, Any]:
    """A finished session in JSON-safe values."""
    return {
        "session_id": session.session_id,
        "epoch": session.epoch,
        "text": session.text,
        "tokens": session.tokens,
        "logprobs": msgspec.to_builtins(session.logprobs),
        "finish_reason": session.finish_reason,
        "stop": session.stop,
        "seed": session.seed,
        "exact": session.exact,
        "usage": msgspec.to_builtins(session.usage),
        "timings": msgspec.to_builtins(session.timings),
    }
