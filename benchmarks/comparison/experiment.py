"""One load, the systems it is put on, and what is read off."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from comparison.job import Ask
from comparison.measures import measured
from comparison.prompts import Prompts
from comparison.trace import Trace

Drive = Callable[[Ask, Prompts], Awaitable[list[Trace]]]
"""Puts the load on a system."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """``load`` names it and its size: results under another name are never taken for this one's.

    ``paired`` systems run in every pair, ``single`` ones in the first alone; both by name. The rest is what each
    system is set up with; see Setting.
    """

    load: str
    paired: Sequence[str]
    single: Sequence[str] = ()
    sessions: int
    session_tokens: int
    drive: Drive
    measure: Callable[[Sequence[Trace]], dict[str, Any]] = measured
    reuse: bool = False
    queue_depth: int = 1024
    options: Mapping[str, Any] = field(default_factory=dict)
