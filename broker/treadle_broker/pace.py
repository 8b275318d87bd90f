"""How many prompt tokens a tick may run, so that none is too long and running streams keep their inter-token latency.

While sessions decode, the time between two of a stream's tokens is one tick: its decode batch and its prefill chunks.
Both are measured; what the target leaves after the decode batch is spent on prefill, under the fixed cap. That is the
token budget of stall-free batching (Agrawal et al., "Sarathi-Serve", OSDI 2024) with the budget found by measurement.
"""

from __future__ import annotations

import msgspec

LEAST_CHUNK = 16
"""Prompt tokens a tick may always run: a target that cannot be met must slow streams down, not stop prompts."""
_SLOWEST_TOKEN_S = 1e9  # no measurement is longer; an infinite one would never be forgotten
_AIM = 0.9  # of the target: a tick is also sent, answered and delivered, and no two take the same time
_RISE, _FALL = 0.5, 0.1  # weight of a measurement above and below the mean: late streams are worse than slow prompts


class PaceMarks(msgspec.Struct, frozen=True, array_like=True):
    """What was measured, in seconds: a decode batch, and one prompt token. None before anything was."""

    decode_s: float | None = None
    prefill_token_s: float | None = None


class PrefillPace:
    """Measures ticks and sets each tick's prefill budget."""

    def __init__(self) -> None:
        self._decode_s: float | None = None
        self._token_s: float | None = None

    @property
    def marks(self) -> PaceMarks:
        """What was measured, for another pace to go on from."""
        return PaceMarks(self._decode_s, self._token_s)

    def remember(self, marks: PaceMarks) -> None:
        """Go on from another pace's marks."""
        self._decode_s, self._token_s = marks.decode_s, marks.prefill_token_s

    @property
    def decode_s(self) -> float | None:
        """Seconds that a decode batch takes; None before anything was measured."""
        return self._decode_s

    def seed(self, decode_s: float, prefill_tokens_per_s: float) -> None:
        """Take a warm-up's measurements (0: it made none) until ticks say better."""
        if self._decode_s is None and decode_s > 0:
            self._decode_s = decode_s
        if self._token_s is None and prefill_tokens_per_s > 0:
            self._token_s = min(1 / prefill_tokens_per_s, _SLOWEST_TOKEN_S)

    def decoded(self, seconds: float) -> None:
        """A decode batch took ``seconds``."""
        self._decode_s = _smoothed(self._decode_s, seconds)

    def prefilled(self, tokens: int, seconds: float) -> None:
        """Chunks of ``tokens`` prompt tokens in all took ``seconds``. A few tell what a call costs, not a token: that
        is a bound, and counts only below the mean.
        """
        if tokens > 0 and (tokens >= LEAST_CHUNK or seconds / tokens < (self._token_s or 0.0)):
            self._token_s = _smoothed(self._token_s, seconds / tokens)

    def expected(self, tokens: int) -> float:
        """Seconds that so many prompt tokens take; 0 before anything is known."""
        return tokens * (self._token_s or 0.0)

    def within(self, cap: int, seconds: float) -> int:
        """Prompt tokens, at most ``cap``, that run in ``seconds``; ``cap`` before anything is known."""
        if not self._token_s:
            return cap
        return min(cap, max(LEAST_CHUNK, int(min(seconds / self._token_s, cap))))

    def budget(self, cap: int, target_s: float) -> int:
        """Prompt tokens for a tick in which sessions decode: at most ``cap``, and ``cap`` before anything is known."""
        return self.within(cap, max(_AIM * target_s - (self._decode_s or 0.0), 0.0))


def _smoothed(mean: float | None, value: float) -> float:
    if mean is None:
        return value
    return mean + (_RISE if value > mean else _FALL) * (value - mean)
