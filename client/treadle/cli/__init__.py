"""The ``treadle`` command."""

from treadle.cli.entry import main

__all__ = ["main"]
