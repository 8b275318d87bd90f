"""The engine that a configuration names, and how it offers itself to a broker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Protocol

from treadle_shared.budget import check_serves
from treadle_shared.config import NodeConfig
from treadle_shared.engine import BatchEngine
from treadle_shared.errors import ConfigError, ModelError, WeightBudgetError
from treadle_shared.limits import MAX_DETAIL, MAX_NAME
from treadle_worker.faults import FaultyEngine, parse_faults

START_ERRORS: Final = (ConfigError, ModelError, WeightBudgetError)
"""What stops a start for good: the operator must change something first."""


@dataclass(frozen=True, slots=True)
class OpenEngine:
    """An engine that has run its first decode. ``close`` frees what it holds; ``device`` and ``exact_detail``
    are for people.
    """

    engine: BatchEngine
    close: Callable[[], None]
    model: str
    device: str
    exact_detail: str


class Observer(Protocol):
    """Told how a start gets on."""

    def on_progress(self, fraction: float) -> None:
        """``fraction`` of the weights, in [0, 1], is loaded."""
        ...

    def on_phase(self, phase: str) -> None:
        """The phase is now ``loading`` or ``testing``."""
        ...


def open_engine(config: NodeConfig, observer: Observer) -> OpenEngine:
    """Load, warm up and test the configured engine. Raises ConfigError, ModelError or WeightBudgetError."""
    faults = parse_faults(config.faults)
    opened = _open(config, observer)
    try:
        check_serves(config, opened.engine.facts)
    except ConfigError:
        opened.close()
        raise
    return replace(opened, engine=FaultyEngine(opened.engine, faults)) if faults else opened


def _open(config: NodeConfig, observer: Observer) -> OpenEngine:
    return _open_reference(config) if config.engine == "reference" else _open_llama(config, observer)


def make_engine(config: NodeConfig) -> BatchEngine:
    """The configured engine, for use in one process; it may have a ``close`` method. Raises as ``open_engine``."""
    return open_engine(config, _Unobserved()).engine


class _Unobserved:
    """Nobody watches the start."""

    def on_progress(self, fraction: float) -> None:
        """See Observer."""

    def on_phase(self, phase: str) -> None:
        """See Observer."""


def _open_reference(config: NodeConfig) -> OpenEngine:
    from treadle_worker.reference import build_reference_engine

    engine = build_reference_engine(config)
    return OpenEngine(engine, _nothing, "reference", "cpu", "one order of operations for every batch and chunk")


def _open_llama(config: NodeConfig, observer: Observer) -> OpenEngine:
    from treadle_worker.llama import LlamaEngine

    engine = LlamaEngine(config, observer.on_progress, observer.on_phase)
    return OpenEngine(engine, engine.close, config.model, engine.device[:MAX_NAME], engine.exact_detail[:MAX_DETAIL])


def _nothing() -> None:
    """The reference engine holds memory alone."""
