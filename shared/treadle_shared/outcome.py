"""How a session ends, and how it stands before that."""

from __future__ import annotations

from enum import StrEnum


class DoneReason(StrEnum):
    """Why a session ended. Every accepted session ends with exactly one of these."""

    STOP = "STOP"
    LENGTH = "LENGTH"
    CANCELLED = "CANCELLED"
    DEADLINE = "DEADLINE"
    CACHE_MISS = "CACHE_MISS"
    FAILED = "FAILED"

    @property
    def bucket(self) -> str:
        """The telemetry counter it falls into: ``done``, ``cancelled`` or ``failed``."""
        return _BUCKETS[self]


_BUCKETS = {
    DoneReason.STOP: "done",
    DoneReason.LENGTH: "done",
    DoneReason.CANCELLED: "cancelled",
    DoneReason.DEADLINE: "failed",
    DoneReason.CACHE_MISS: "failed",
    DoneReason.FAILED: "failed",
}
