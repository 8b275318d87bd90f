"""What a session tells while it runs."""

from __future__ import annotations

import msgspec

from treadle_shared.calls import SessionTimings, Usage


class TokenLogprob(msgspec.Struct, frozen=True):
    """The natural-log probability of one token of the answer.

    ``top`` holds the likeliest tokens at that place, each as ``(token, logprob)``, as many as were asked for.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class QueuePosition(msgspec.Struct, frozen=True):
    """The session waits behind ``ahead`` others."""

    ahead: int


class Started(msgspec.Struct, frozen=True):
    """The session left the queue after ``queued_s`` seconds."""

    queued_s: float


class Recovering(msgspec.Struct, frozen=True):
    """The session's KV cache was lost and is being rebuilt; the stream will go on. ``why`` is for people."""

    why: str


class TextDelta(msgspec.Struct, frozen=True):
    """New tokens, the first of which is number ``index`` of the answer, and the text that they completed.

    ``text`` is whole characters and may be empty: a character is not complete yet, or a stop string may have
    begun. Joined texts are the whole answer.
    """

    text: str
    tokens: tuple[int, ...]
    index: int
    logprobs: tuple[TokenLogprob, ...] = ()


class Done(msgspec.Struct, frozen=True):
    """The session's end, the last event of every accepted one.

    ``finish_reason`` is ``stop``, ``length``, ``cancelled``, ``deadline``, ``cache_miss`` or ``failed``;
    ``stop`` the stop string that ended it. ``exact``: the tokens depend on recipe, prompt, parameters and
    seed alone.
    """

    finish_reason: str
    usage: Usage
    timings: SessionTimings
    detail: str = ""
    stop: str = ""
    exact: bool = False


Event = QueuePosition | Started | Recovering | TextDelta | Done
