"""What the methods of both clients take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, TypedDict

from treadle_shared.calls import ChatMessage

Prompt = str | Iterable[int]
Message = Mapping[str, str] | ChatMessage

CONNECT_TIMEOUT_S: Final = 5.0  # a broker answers in milliseconds; the rest is for one that is just starting
CALL_TIMEOUT_S: Final = 30.0  # decisions take milliseconds; the rest is for prompts of megabytes on a busy node
RESUME_TIMEOUT_S: Final = 60.0  # a supervisor restarts a broker in seconds; a model need not be loaded again


class Options(TypedDict, total=False):
    """What a generation can be asked for, beside its prompt. See SamplingParams and Request for the bounds."""

    max_tokens: int | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    presence_penalty: float
    frequency_penalty: float
    penalty_last_n: int
    logit_bias: Mapping[int, float]
    seed: int | None
    logprobs: int | None
    ignore_eos: bool
    stop: str | Sequence[str]
    session_id: str
    priority: int
    queue_timeout_s: float | None
    deadline_s: float | None
    cache_salt: str


class CallOptions(Options, total=False):
    """Options of a generation, and how long the caller waits for the node: for its decision, between events."""

    timeout: float | None
    idle_timeout: float | None
