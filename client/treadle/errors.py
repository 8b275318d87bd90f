"""What a caller can be told, and whose fault it is.

TreadleError                 (treadle_shared.errors)
├── InvalidRequest           the caller's: ``field`` of a request cannot be served
│   └── RejectedRequest      the same, found by the node (also a Refused)
├── Refused                  the node did not take the request on; ``decision`` explains
│   ├── Overloaded           the queue is full: come back after ``retry_after_s``
│   ├── QuotaExceeded        this client holds too much unread output: read it, then come back
│   ├── ContextTooLong       prompt and answer are longer than a session may be
│   ├── BudgetExceeded       the session would not fit the KV or scratch budget of an empty node
│   ├── DuplicateSession     a live session of this client has that id
│   ├── Draining             the node is shutting down
│   └── NotReady             the node has no model to serve with (also an Unavailable)
├── SessionEnded             an accepted session ended without its whole answer; ``text`` is what came
│   ├── DeadlineExceeded     its queue timeout or deadline passed
│   ├── Cancelled            someone else cancelled it: an operator, or a drain
│   ├── CacheMiss            its KV cache was lost and could not be rebuilt
│   └── SessionFailed        the node could not finish it; ``detail`` says why
├── Unavailable              no broker answers in the runtime directory, or it went away
├── CallTimeout              no answer within the caller's own timeout (also a TimeoutError)
├── ClientClosed             the client was closed while, or before, it was used
├── ForkedClient             the client was made before a fork (also a RuntimeError)
├── Forbidden                the endpoint does not grant that
└── ProtocolError            (treadle_shared.errors) the node speaks something else
    └── VersionMismatch      another major version of the protocol
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from treadle_shared import AdmissionDecision, AdmissionReason, DoneReason
from treadle_shared.calls import Failure
from treadle_shared.errors import InvalidRequest, MalformedMessage, ProtocolError, TreadleError, VersionMismatch

__all__ = [
    "BudgetExceeded",
    "CacheMiss",
    "CallTimeout",
    "Cancelled",
    "ClientClosed",
    "ContextTooLong",
    "DeadlineExceeded",
    "Draining",
    "DuplicateSession",
    "Forbidden",
    "ForkedClient",
    "InvalidRequest",
    "NotReady",
    "Overloaded",
    "ProtocolError",
    "QuotaExceeded",
    "Refused",
    "RejectedRequest",
    "SessionEnded",
    "SessionFailed",
    "TreadleError",
    "Unavailable",
    "VersionMismatch",
    "again",
    "end_error",
    "failure_error",
    "local_overload",
    "refusal",
]


class Unavailable(TreadleError):  # noqa: N818  (the names of this module are the service's vocabulary)
    """No broker answers, or it went away; nothing more will come from sessions it ran."""


class Refused(TreadleError):  # noqa: N818
    """The node did not take the request on.

    ``decision`` is its answer; ``decisions`` are the answers to everything submitted together, in order.
    """

    def __init__(self, decision: AdmissionDecision, decisions: Sequence[AdmissionDecision] = ()) -> None:
        TreadleError.__init__(self, _sentence(decision))  # by name: InvalidRequest may come next and takes others
        self.decision = decision
        self.decisions = tuple(decisions) or (decision,)

    @property
    def reason(self) -> AdmissionReason:
        """The stable name of the answer."""
        return self.decision.reason

    @property
    def budget(self) -> str:
        """Which bound refused."""
        return self.decision.budget

    @property
    def needed(self) -> int:
        """What the request needs, in the bound's unit."""
        return self.decision.needed

    @property
    def available(self) -> int:
        """What is free of the bound."""
        return self.decision.available

    @property
    def limit(self) -> int:
        """The whole bound."""
        return self.decision.limit

    @property
    def retry_after_s(self) -> float | None:
        """Seconds after which it is worth trying again; None where waiting does not help."""
        return self.decision.retry_after_s


class Overloaded(Refused):
    """The queue is full."""


class QuotaExceeded(Refused):
    """This client holds more unread output than the node keeps for one."""


class ContextTooLong(Refused):
    """Prompt and answer together are longer than a session may be (tokens)."""


class BudgetExceeded(Refused):
    """The session alone exceeds the node's KV or scratch budget (bytes); waiting does not help."""


class DuplicateSession(Refused):
    """A live session of this client has that id."""


class Draining(Refused):
    """The node finishes what it runs and takes nothing new."""


class NotReady(Refused, Unavailable):
    """The broker is there, but no model is."""


class RejectedRequest(Refused, InvalidRequest):
    """The node found a field that it cannot serve; ``field`` names it."""

    def __init__(self, decision: AdmissionDecision, decisions: Sequence[AdmissionDecision] = ()) -> None:
        super().__init__(decision, decisions)
        self.field = decision.field
        self.problem = decision.message


class SessionEnded(TreadleError):  # noqa: N818
    """An accepted session ended without its whole answer.

    ``text`` is the part of the answer that came, ``detail`` the node's explanation.
    """

    def __init__(self, session_id: str, detail: str = "", text: str = "") -> None:
        what = _SUMMARY.get(type(self), "ended early")
        super().__init__(f"session {session_id}: {what}{': ' + detail if detail else ''}")
        self.session_id = session_id
        self.detail = detail
        self.text = text


class DeadlineExceeded(SessionEnded):
    """The queue timeout or the deadline of the request passed."""


class Cancelled(SessionEnded):
    """Someone other than this caller cancelled the session."""


class CacheMiss(SessionEnded):
    """The session's KV cache was lost and not rebuilt; the same request can be sent again."""


class SessionFailed(SessionEnded):
    """The node could not finish the session."""


class CallTimeout(TreadleError, TimeoutError):  # noqa: N818
    """The node did not answer within the caller's timeout. A submission that timed out is cancelled."""


class ClientClosed(TreadleError):  # noqa: N818
    """The client is closed; its sessions were cancelled."""


class ForkedClient(TreadleError, RuntimeError):  # noqa: N818
    """The client was made before a fork: its thread and socket belong to the other process. Make a new one."""


class Forbidden(TreadleError):  # noqa: N818
    """The endpoint does not grant this; operators' commands need the control endpoint."""


_SUMMARY: Final[dict[type[SessionEnded], str]] = {
    DeadlineExceeded: "its time ran out",
    Cancelled: "cancelled",
    CacheMiss: "its KV cache was lost",
    SessionFailed: "failed",
}

_REFUSALS: Final[dict[AdmissionReason, type[Refused]]] = {
    AdmissionReason.REJECTED_KV_BUDGET: BudgetExceeded,
    AdmissionReason.REJECTED_SCRATCH_BUDGET: BudgetExceeded,
    AdmissionReason.REJECTED_DUPLICATE: DuplicateSession,
    AdmissionReason.REJECTED_QUEUE_FULL: Overloaded,
    AdmissionReason.REJECTED_CONTEXT: ContextTooLong,
    AdmissionReason.REJECTED_INVALID: RejectedRequest,
    AdmissionReason.REJECTED_DRAINING: Draining,
    AdmissionReason.REJECTED_UNAVAILABLE: NotReady,
    AdmissionReason.REJECTED_QUOTA: QuotaExceeded,
}

_ENDS: Final[dict[DoneReason, type[SessionEnded]]] = {
    DoneReason.CANCELLED: Cancelled,
    DoneReason.DEADLINE: DeadlineExceeded,
    DoneReason.CACHE_MISS: CacheMiss,
    DoneReason.FAILED: SessionFailed,
}

_BUSY: Final = "busy"
_FULL: Final = AdmissionReason.REJECTED_QUEUE_FULL


def refusal(decision: AdmissionDecision, decisions: Sequence[AdmissionDecision] = ()) -> Refused:
    """The error of a decision that did not accept; ``decisions`` are those of its whole group."""
    return _REFUSALS[decision.reason](decision, decisions)


def end_error(reason: DoneReason, session_id: str, detail: str = "", text: str = "") -> SessionEnded | None:
    """The error of a session's end, or None where it ended as asked (STOP, LENGTH)."""
    kind = _ENDS.get(reason)
    return kind(session_id, detail, text) if kind else None


def failure_error(failure: Failure) -> TreadleError:
    """The error of a message that the broker could not serve."""
    if failure.code in ("invalid", "malformed") and failure.field:
        return InvalidRequest(_plain_field(failure.field), failure.message)
    if failure.code == "version":
        return VersionMismatch(failure.message or "the node speaks another version of the protocol")
    if failure.code == "forbidden":
        return Forbidden(failure.message or "the endpoint does not grant this")
    if failure.code == _BUSY:
        return Overloaded(AdmissionDecision(reason=_FULL, session_id="", budget=failure.field, message=failure.message))
    return MalformedMessage(f"the node answered {failure.code}: {failure.message}", failure.field)


def local_overload(budget: str, limit: int) -> Overloaded:
    """The error of a bound that the client itself keeps; nothing was sent."""
    return Overloaded(AdmissionDecision(reason=_FULL, session_id="", budget=budget, needed=1, limit=limit))


def again(error: TreadleError) -> TreadleError:
    """The same connection error once more: each waiting caller raises its own, with its own traceback."""
    return type(error)(str(error))


def _plain_field(path: str) -> str:
    """The field as the caller wrote it: ``requests[0].params.top_k`` is ``top_k``."""
    head, _, rest = path.partition(".")
    plain = rest if head.startswith("requests[") and rest else path
    return plain.removeprefix("params.")


def _sentence(decision: AdmissionDecision) -> str:
    parts = [decision.reason.value]
    if decision.field or decision.message:
        parts.append(": ".join(part for part in (decision.field, decision.message) if part))
    if decision.budget:
        parts.append(
            f"{decision.budget}: needed {decision.needed}, available {decision.available}, limit {decision.limit}"
        )
    if decision.retry_after_s is not None:
        parts.append(f"retry after {decision.retry_after_s:.2f} s")
    return "; ".join(parts)
