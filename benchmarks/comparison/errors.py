"""What stops a benchmark."""

from __future__ import annotations


class BenchmarkError(Exception):
    """Something is missing or did not start; the message says what and how to get it."""
