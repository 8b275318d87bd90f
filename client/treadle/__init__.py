"""Talk to a Treadle node: many LLM sessions at once from one model.

>>> from treadle import Client
>>> with Client() as client:
...     for text in client.chat([{"role": "user", "content": "Why is the sky blue?"}], max_tokens=64):
...         print(text, end="", flush=True)
"""

from treadle.async_client import AsyncClient
from treadle.async_session import AsyncSession
from treadle.client import Client
from treadle.errors import (
    BudgetExceeded,
    CacheMiss,
    CallTimeout,
    Cancelled,
    ClientClosed,
    ContextTooLong,
    DeadlineExceeded,
    Draining,
    DuplicateSession,
    Forbidden,
    ForkedClient,
    InvalidRequest,
    NotReady,
    Overloaded,
    ProtocolError,
    QuotaExceeded,
    Refused,
    RejectedRequest,
    SessionEnded,
    SessionFailed,
    TreadleError,
    Unavailable,
    VersionMismatch,
)
from treadle.events import Done, Event, QueuePosition, Recovering, Started, TextDelta, TokenLogprob
from treadle.session import Session
from treadle_shared.calls import Request, SessionTimings, Usage
from treadle_shared.sampling import SamplingParams

__all__ = [
    "AsyncClient",
    "AsyncSession",
    "BudgetExceeded",
    "CacheMiss",
    "CallTimeout",
    "Cancelled",
    "Client",
    "ClientClosed",
    "ContextTooLong",
    "DeadlineExceeded",
    "Done",
    "Draining",
    "DuplicateSession",
    "Event",
    "Forbidden",
    "ForkedClient",
    "InvalidRequest",
    "NotReady",
    "Overloaded",
    "ProtocolError",
    "QueuePosition",
    "QuotaExceeded",
    "Recovering",
    "Refused",
    "RejectedRequest",
    "Request",
    "SamplingParams",
    "Session",
    "SessionEnded",
    "SessionFailed",
    "SessionTimings",
    "Started",
    "TextDelta",
    "TokenLogprob",
    "TreadleError",
    "Unavailable",
    "Usage",
    "VersionMismatch",
]
