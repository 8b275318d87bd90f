"""The answer to every submission."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class AdmissionReason(StrEnum):
    """Stable names of every answer a submission can get."""

    ADMITTED = "ADMITTED"
    QUEUED = "QUEUED"
    REJECTED_KV_BUDGET = "REJECTED_KV_BUDGET"
    REJECTED_SCRATCH_BUDGET = "REJECTED_SCRATCH_BUDGET"
    REJECTED_DUPLICATE = "REJECTED_DUPLICATE"
    REJECTED_QUEUE_FULL = "REJECTED_QUEUE_FULL"
    REJECTED_CONTEXT = "REJECTED_CONTEXT"
    REJECTED_INVALID = "REJECTED_INVALID"
    REJECTED_DRAINING = "REJECTED_DRAINING"
    REJECTED_UNAVAILABLE = "REJECTED_UNAVAILABLE"
    REJECTED_QUOTA = "REJECTED_QUOTA"

    @property
    def accepted(self) -> bool:
        """Whether the session will be run: now (ADMITTED) or later (QUEUED)."""
        return self in (AdmissionReason.ADMITTED, AdmissionReason.QUEUED)


class AdmissionDecision(msgspec.Struct, frozen=True, kw_only=True):
    """One decision. A refusal explains itself.

    ``budget`` names the bound that refused; ``needed``, ``available`` and ``limit`` are in that bound's unit
    (bytes for the byte budgets, tokens for the context, requests for the queue). ``retry_after_s`` is set
    where waiting can help. ``epoch`` tells apart sessions that used the same id one after the other.
    ``position`` is the number of requests ahead of a QUEUED one.
    """

    reason: AdmissionReason
    session_id: str
    epoch: int = 0
    position: int = 0
    budget: str = ""
    needed: int = 0
    available: int = 0
    limit: int = 0
    retry_after_s: float | None = None
    field: str = ""
    message: str = ""

    @property
    def accepted(self) -> bool:
        """Whether the session will be run."""
        return self.reason.accepted
