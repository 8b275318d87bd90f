"""Messages between a client and the broker.

A client sends one message a frame. The broker answers with frames that hold an array of messages, so that
everything a client gets in one turn of the broker's loop travels together. ``rid`` ties an answer to its
request; events of a running session carry ``(session_id, epoch)`` instead.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from treadle_shared.admission import AdmissionDecision
from treadle_shared.limits import (
    MAX_MESSAGES,
    MAX_NAME,
    MAX_REQUESTS,
    MAX_STOP_CHARS,
    MAX_STOPS,
    MAX_TEXT_BYTES,
    MAX_TOKENS_BYTES,
)
from treadle_shared.outcome import DoneReason
from treadle_shared.request import MAX_NEW_TOKENS
from treadle_shared.sampling import SamplingParams
from treadle_shared.ticks import Count, Detail, Name, TokenBytes

Rid = Annotated[int, Meta(ge=0, lt=1 << 53)]
Text = Annotated[str, Meta(max_length=MAX_TEXT_BYTES)]
Key = Annotated[bytes, Meta(min_length=16, max_length=16)]
Timeout = Annotated[float, Meta(gt=0.0, le=1e6)]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
SessionId = Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One turn of a chat; ``role`` is system, user, assistant or tool."""

    role: Annotated[str, Meta(min_length=1, max_length=32)]
    content: Text


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One generation. Exactly one of ``prompt`` (text), ``tokens`` (int32 array) and ``messages`` is set.

    ``max_tokens`` None takes the node's default. ``session_id`` empty lets the node choose one. ``key`` is a
    random 128-bit secret that cancel and attach require; the same request sent again with the same key gets
    the same decision. ``stop`` strings end the answer and are not part of it.

    ``emitted`` resumes a session: the tokens of its answer that the client holds (an int32 array, perhaps empty), with
    the ``key`` and all the parameters that its first acceptance told. The answer goes on after them. ``recipe`` is what
    they were computed with, as the acceptance or the first delta told: a node of another recipe ends the session.

    ``cache_salt``: only requests with the same one may start from one another's prompt; whoever does not know it
    cannot learn from an answer's speed what others asked.
    """

    prompt: Text | None = None
    tokens: Annotated[bytes, Meta(max_length=MAX_TOKENS_BYTES)] | None = None
    messages: Annotated[list[ChatMessage], Meta(max_length=MAX_MESSAGES)] | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=MAX_NEW_TOKENS)] | None = None
    params: SamplingParams = SamplingParams()
    stop: Annotated[
        list[Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]], Meta(max_length=MAX_STOPS)
    ] = []
    session_id: Annotated[str, Meta(max_length=MAX_NAME)] = ""
    key: Key | None = None
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0
    queue_timeout_s: Timeout | None = None
    deadline_s: Timeout | None = None
    emitted: Annotated[bytes, Meta(max_length=MAX_TOKENS_BYTES)] | None = None
    recipe: Name = ""
    cache_salt: Annotated[str, Meta(max_length=MAX_NAME)] = ""


# ---- client to broker


class Hello(msgspec.Struct, frozen=True, tag="hello", kw_only=True, forbid_unknown_fields=True):
    """Opens a connection; anything else before it is answered with an error."""

    major: Count
    minor: Count
    client: Name = ""


class Submit(msgspec.Struct, frozen=True, tag="submit", kw_only=True, forbid_unknown_fields=True):
    """Submit requests together: all are accepted or none. Answered by Decisions."""

    rid: Rid
    requests: Annotated[list[Request], Meta(min_length=1, max_length=MAX_REQUESTS)]


class Cancel(msgspec.Struct, frozen=True, tag="cancel", kw_only=True, forbid_unknown_fields=True):
    """End one session, by exact id. Idempotent. ``key`` is required except on the control endpoint.

    ``epoch`` None means the newest. Answered by Cancelled.
    """

    rid: Rid
    session_id: SessionId
    epoch: Count | None = None
    key: Key | None = None


class Attach(msgspec.Struct, frozen=True, tag="attach", kw_only=True, forbid_unknown_fields=True):
    """Read a session's stream from token number ``have_tokens`` of the answer on. Answered by Attached."""

    rid: Rid
    session_id: SessionId
    epoch: Count
    key: Key
    have_tokens: Count = 0


class Tokenize(msgspec.Struct, frozen=True, tag="tokenize", kw_only=True, forbid_unknown_fields=True):
    """Token ids of a text as a prompt would be tokenised. Answered by Tokenized."""

    rid: Rid
    text: Text


class Ask(msgspec.Struct, frozen=True, tag="ask", kw_only=True, forbid_unknown_fields=True):
    """Ask for a fact: ``model``, ``status``, ``telemetry`` or (control endpoint) ``sessions``. Answered by Facts."""

    rid: Rid
    what: Name


class Drain(msgspec.Struct, frozen=True, tag="drain", kw_only=True, forbid_unknown_fields=True):
    """Control endpoint only: refuse new sessions, finish what runs, then stop. Answered by Facts."""

    rid: Rid
    timeout_s: Timeout | None = None


class Goodbye(msgspec.Struct, frozen=True, tag="goodbye", kw_only=True, forbid_unknown_fields=True):
    """The client closes on purpose; its sessions are cancelled at once."""


# ---- broker to client


class Welcome(msgspec.Struct, frozen=True, tag="welcome", kw_only=True, forbid_unknown_fields=True):
    """The connection is open. ``boot_id`` changes with each start of the broker."""

    major: Count
    minor: Count
    boot_id: Name


class Decision(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One admission decision with what the client needs to own the session: seed, key, prompt length.

    ``recipe`` is the fingerprint of what the node computes with; empty while no worker has told it yet.
    """

    admission: AdmissionDecision
    seed: int = 0
    key: bytes = b""
    prompt_tokens: Count = 0
    max_tokens: Count = 0
    recipe: Name = ""


class Decisions(msgspec.Struct, frozen=True, tag="decisions", kw_only=True, forbid_unknown_fields=True):
    """One decision for each request, in order."""

    rid: Rid
    decisions: Annotated[list[Decision], Meta(max_length=MAX_REQUESTS)]


class Cancelled(msgspec.Struct, frozen=True, tag="cancelled", kw_only=True, forbid_unknown_fields=True):
    """``found`` is False where the session is unknown or had already ended."""

    rid: Rid
    found: bool


class Attached(msgspec.Struct, frozen=True, tag="attached", kw_only=True, forbid_unknown_fields=True):
    """``found`` is False where the session is unknown, its log has expired or the key is wrong."""

    rid: Rid
    found: bool


class Tokenized(msgspec.Struct, frozen=True, tag="tokenized", kw_only=True, forbid_unknown_fields=True):
    """Token ids as an int32 array."""

    rid: Rid
    tokens: TokenBytes


class Facts(msgspec.Struct, frozen=True, tag="facts", kw_only=True, forbid_unknown_fields=True):
    """JSON-safe facts."""

    rid: Rid
    facts: dict[str, Any]


class Failure(msgspec.Struct, frozen=True, tag="failure", kw_only=True, forbid_unknown_fields=True):
    """A message could not be served. ``code``: ``malformed``, ``version``, ``hello_first``, ``invalid``,
    ``forbidden`` or ``busy``; ``field`` names what was wrong. ``rid`` None where it could not be read.
    """

    rid: Rid | None = None
    code: Name
    field: Name = ""
    message: Detail = ""


class Position(msgspec.Struct, frozen=True, tag="position", kw_only=True, forbid_unknown_fields=True):
    """A queued session has ``ahead`` requests before it."""

    session_id: Name
    epoch: Count
    ahead: Count


class Started(msgspec.Struct, frozen=True, tag="started", kw_only=True, forbid_unknown_fields=True):
    """A session left the queue after ``queued_s`` seconds."""

    session_id: Name
    epoch: Count
    queued_s: float


class Recovering(msgspec.Struct, frozen=True, tag="recovering", kw_only=True, forbid_unknown_fields=True):
    """A session's KV was lost; it is being rebuilt and the stream will go on. ``why`` is for people."""

    session_id: Name
    epoch: Count
    why: Detail = ""


class Logprob(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One token's natural-log probability and the likeliest alternatives ``(token, logprob)``."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


class Delta(msgspec.Struct, frozen=True, tag="delta", kw_only=True, forbid_unknown_fields=True):
    """New tokens, the first of which is number ``index`` of the answer, and the text they completed.

    ``text`` may be empty (a character is not complete, or a stop string may have begun). The delta that begins the
    answer tells the ``recipe`` of all its tokens.
    """

    session_id: Name
    epoch: Count
    index: Count
    tokens: TokenBytes
    text: str
    logprobs: list[Logprob] = []
    recipe: Name = ""


class Usage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tokens of the prompt and of the answer, and how much of the prompt came from a cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


class SessionTimings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds, measured in the broker: in the queue, from submission to first token, and in all."""

    queued_s: float
    ttft_s: float | None
    total_s: float


class Done(msgspec.Struct, frozen=True, tag="done", kw_only=True, forbid_unknown_fields=True):
    """The one terminal message of a session. ``exact``: its tokens depend on recipe, prompt, parameters and
    seed alone.
    """

    session_id: Name
    epoch: Count
    reason: DoneReason
    detail: Detail = ""
    stop: str = ""
    usage: Usage
    timings: SessionTimings
    exact: bool = False


FromClient = Hello | Submit | Cancel | Attach | Tokenize | Ask | Drain | Goodbye
ToClient = (
    Welcome
    | Decisions
    | Cancelled
    | Attached
    | Tokenized
    | Facts
    | Failure
    | Position
    | Started
    | Recovering
    | Delta
    | Done
)
