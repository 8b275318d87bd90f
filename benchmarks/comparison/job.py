"""One request of a load."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from comparison.trace import Trace


@dataclass(frozen=True, slots=True)
class Job:
    """A prompt of token ids and how many tokens to generate: greedy, and never fewer."""

    prompt: tuple[int, ...]
    new_tokens: int
    group: str = ""


Ask = Callable[[Job, Trace], Coroutine[Any, Any, None]]
"""Sends one request to a system and notes in the trace what comes, until its end. Being cancelled, it gives the
request up."""
