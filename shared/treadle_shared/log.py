"""Logging: events with bound ids, JSON lines unless standard error is a terminal. Never prompts or tokens."""

from __future__ import annotations

import logging
import sys
from typing import Literal

import structlog

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def set_up_logging(process: str, level: str = "info", style: Literal["auto", "json", "console"] = "auto") -> None:
    """Configure structlog for this process; every event carries ``process``. Lines go to standard error, each in one
    write: a node's processes share it.
    """
    console = style == "console" or (style == "auto" and sys.stderr.isatty())
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer() if console else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(process=process)


def get_logger(name: str) -> structlog.typing.FilteringBoundLogger:
    """A logger whose events carry ``component``."""
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(component=name)
    return logger
