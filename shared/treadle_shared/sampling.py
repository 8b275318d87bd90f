"""How the next token is chosen from a row of logits."""

from __future__ import annotations

import math
from typing import Annotated

import msgspec
from msgspec import Meta

from treadle_shared.errors import InvalidRequest

MAX_TOP_LOGPROBS = 20  # the largest list other servers of this kind return
MAX_LOGIT_BIAS = 1024  # entries; each is scanned for every draw
MAX_PENALTY_WINDOW = 4096  # tokens; bounds the sampler's ring buffer
SEED_LIMIT = 1 << 32  # llama.cpp's seeds are uint32; its all-ones value means "random" and is excluded

Finite = Annotated[float, Meta(ge=-1e6, le=1e6)]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Parameters of one session's sampler chain, applied in the order of llama.cpp's common chain:
    logit bias, penalties, top-k, top-p, min-p, temperature, seeded draw.

    ``temperature`` 0 is greedy and ignores the filters. ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are off;
    penalties are off at ``repeat_penalty`` 1 and 0 for the others, and look at the last ``penalty_last_n``
    tokens of prompt and answer. ``seed`` in [0, 2^32-1); None asks the node to draw one. ``logprobs`` None is
    off, n returns the chosen token's natural-log probability and the n likeliest (over the raw logits).
    ``ignore_eos`` masks every end-of-generation token, so the answer has exactly ``max_tokens`` tokens.

    Raises InvalidRequest naming the field.
    """

    temperature: float = 0.0
    top_k: Annotated[int, Meta(ge=0, le=1 << 20)] = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_last_n: Annotated[int, Meta(ge=0, le=MAX_PENALTY_WINDOW)] = 64
    logit_bias: Annotated[dict[Annotated[int, Meta(ge=0)], float], Meta(max_length=MAX_LOGIT_BIAS)] = {}
    seed: Annotated[int, Meta(ge=0, lt=SEED_LIMIT - 1)] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _check_range("temperature", self.temperature, 0.0, 100.0)
        _check_range("top_p", self.top_p, 0.0, 1.0)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("repeat_penalty", self.repeat_penalty, 0.01, 100.0)
        _check_range("presence_penalty", self.presence_penalty, -100.0, 100.0)
        _check_range("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        for token, bias in self.logit_bias.items():
            _check_range(f"logit_bias[{token}]", bias, -1e6, 1e6)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken and no random number is drawn."""
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        """Whether the draw depends on tokens already seen."""
        off = self.repeat_penalty == 1.0 and self.presence_penalty == 0.0 and self.frequency_penalty == 0.0
        return self.penalty_last_n > 0 and not off

    @property
    def plain_argmax(self) -> bool:
        """Whether the choice is the arg max of the untouched logits row."""
        return self.greedy and not self.penalised and not self.logit_bias and not self.ignore_eos


def _check_range(field: str, value: float, low: float, high: float) -> None:
    """NaN fails every comparison, so it needs its own look."""
    if math.isnan(value) or not low <= value <= high:
        raise InvalidRequest(field, f"must be between {low:g} and {high:g}, not {value}")
