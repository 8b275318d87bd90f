"""Sessions whose connection was lost, until a broker takes them back.

The client sends the request again with what it holds: the key, the seed, the tokens that came and the recipe they were
computed with. A broker that still runs the session goes on from there; a new one rebuilds it and goes on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec

from treadle._stream import Stream
from treadle_shared import AdmissionReason, calls
from treadle_shared.tokens import pack_tokens

RETRY_S: Final = 0.25  # how often a session that a broker could not take yet is offered again
NOT_YET: Final = frozenset(
    {
        AdmissionReason.REJECTED_QUEUE_FULL,
        AdmissionReason.REJECTED_UNAVAILABLE,
        AdmissionReason.REJECTED_DRAINING,
        AdmissionReason.REJECTED_QUOTA,
    }
)
"""Refusals that time can cure: the next broker, or the next moment, may take the session."""


@dataclass(slots=True)
class _Waiting:
    stream: Stream
    deadline: float
    next_offer: float
    offered: bool = False


class Resumption:
    """Lost sessions. Each is offered until a broker takes it or ``timeout_s`` seconds have passed since its loss."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._waiting: dict[Stream, _Waiting] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, stream: object) -> bool:
        return stream in self._waiting

    def lost(self, stream: Stream, now: float) -> None:
        """A session's connection is gone (again, perhaps while it was on offer)."""
        known = self._waiting.get(stream)
        deadline = now + self.timeout_s if known is None else known.deadline
        self._waiting[stream] = _Waiting(stream, deadline, now)

    def offers(self, now: float) -> list[Stream]:
        """Sessions to offer now; each counts as offered until ``refused`` or ``lost``."""
        due = [entry for entry in self._waiting.values() if not entry.offered and entry.next_offer <= now]
        for entry in due:
            entry.offered = True
        return [entry.stream for entry in due]

    def refused(self, stream: Stream, now: float) -> None:
        """No broker takes it yet."""
        entry = self._waiting.get(stream)
        if entry is not None:
            entry.offered, entry.next_offer = False, now + RETRY_S

    def expired(self, now: float) -> list[Stream]:
        """Sessions whose time is up; they are forgotten."""
        over = [entry.stream for entry in self._waiting.values() if entry.deadline <= now]
        for stream in over:
            del self._waiting[stream]
        return over

    def drop(self, stream: Stream) -> None:
        """Taken back, or given up."""
        self._waiting.pop(stream, None)

    def clear(self) -> list[Stream]:
        """Forget them all; returns them."""
        streams = list(self._waiting)
        self._waiting.clear()
        return streams


def resumed_request(stream: Stream) -> calls.Request:
    """The request of a lost session, with what its acceptance told and the tokens that came."""
    decision, request = stream.decision, stream.request
    assert decision is not None
    return msgspec.structs.replace(
        request,
        session_id=decision.admission.session_id,
        key=decision.key,
        max_tokens=decision.max_tokens,
        params=msgspec.structs.replace(request.params, seed=decision.seed),
        emitted=pack_tokens(stream.tokens),
        recipe=stream.recipe if stream.tokens else "",
    )
