"""The engine contract: what a scheduler asks of a model, and what it is told in return.

An engine keeps the KV state of many *sequences*, each keyed by ``(session, epoch)``. Behind a worker the
session is a slot number and the epoch the slot's generation, so an engine never learns who is being served.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol, runtime_checkable

import msgspec
from msgspec import Meta

from treadle_shared.sampling import SamplingParams

Positive = Annotated[int, Meta(ge=1, lt=1 << 53)]
Size = Annotated[int, Meta(ge=0, lt=1 << 53)]
Rate = Annotated[float, Meta(ge=0.0, le=1e9)]


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine says of itself once its model is loaded. All sizes in bytes, all lengths in tokens.

    ``context_tokens`` is what one sequence can hold; ``max_sequences`` how many there can be.
    ``scratch_bytes_per_session`` is measured: logits row, sampler, activation buffers.
    ``min_prefill_rows``: the fewest prompt tokens of one sequence that may run together (2 where a lone row
    takes other kernels; a prompt of one token is exempt). ``replay_decode``: emitted tokens must be rebuilt
    one decode row at a time for their bits to repeat; else they are prefilled. ``prefill_tokens_per_s`` and
    ``decode_tick_s`` are a warm-up's measurements, used until real ticks say better. A parked sequence takes at most
    ``parked_bytes_each`` and ``parked_bytes_per_token`` for each row (0: the engine cannot park); ``park_tokens_per_s``
    is how many rows a second it moves out and back in again (0: not measured, as good as free). ``can_copy``: the
    engine is a CopyingEngine too.
    """

    recipe_fingerprint: str
    n_vocab: Positive
    context_tokens: Positive
    max_sequences: Positive
    kv_bytes_per_token: Positive
    weight_bytes: Size
    scratch_bytes_per_session: Size = 0
    min_prefill_rows: Annotated[int, Meta(ge=1, le=64)] = 1
    replay_decode: bool = False
    exact: bool = False
    tokenizer_fingerprint: str = ""
    prefill_tokens_per_s: Rate = 0.0
    decode_tick_s: Rate = 0.0
    parked_bytes_each: Size = 0
    parked_bytes_per_token: Size = 0
    park_tokens_per_s: Rate = 0.0
    can_copy: bool = False

    @property
    def can_park(self) -> bool:
        """Whether the engine is a ParkingEngine."""
        return self.parked_bytes_per_token > 0


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probabilities over the raw logits: the chosen token's, and the likeliest ``(token, logprob)``."""

    chosen: float
    top: list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class PrefillItem:
    """A chunk of one sequence's prompt.

    ``tokens`` go to positions ``start .. start+len(tokens)-1``. The first chunk (``start == 0``) carries
    ``params``, where the sequence was not opened by a copy; ``sample`` asks for the token after the last row.
    ``n_emitted`` counts how many tokens at the end of the *whole* prefilled sequence were emitted before (a
    rebuilt session): the next draw is draw number ``n_emitted`` of its seed.
    """

    session: int | str
    epoch: int
    start: int
    tokens: Sequence[int]
    sample: bool
    n_emitted: int = 0
    params: SamplingParams | None = None


@dataclass(frozen=True, slots=True)
class DecodeItem:
    """One row of one sequence at position ``pos``.

    ``token`` None feeds the sequence's own last sampled token back; a value forces that token (rebuilding a
    session). ``sample`` False runs the row for its KV alone and yields no token.
    """

    session: int | str
    epoch: int
    pos: int
    token: int | None = None
    sample: bool = True


@dataclass(frozen=True, slots=True)
class CopyItem:
    """A new sequence that begins with the first ``rows`` rows of another.

    ``params`` None makes a sequence that is only copied from. ``seen`` are the newest of the copied tokens, as many
    as the penalties of ``params`` look at.
    """

    source: int | str
    source_epoch: int
    session: int | str
    epoch: int
    rows: int
    params: SamplingParams | None = None
    seen: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one item yielded.

    ``token`` is the sampled token, or None where none was asked for or ``cache_miss`` is set. ``eog`` marks
    an end-of-generation token. ``cache_miss``: the sequence's KV is gone, nothing was run for it.
    """

    session: int | str
    epoch: int
    token: int | None = None
    eog: bool = False
    cache_miss: bool = False
    logprobs: TokenLogprobs | None = None


@runtime_checkable
class BatchEngine(Protocol):
    """A model that runs many sequences in one batch.

    One thread at a time may call it. Results come in the order of the items. A sequence's results must not
    depend on what else is in the batch.
    """

    @property
    def recipe_fingerprint(self) -> str:
        """A stable name for everything that can change a token: model, numerics, build, device."""
        ...

    @property
    def facts(self) -> EngineFacts:
        """What the loaded model is and costs."""
        ...

    def prefill(self, items: Sequence[PrefillItem]) -> list[StepResult]:
        """Run prompt chunks, at most one for each sequence; a chunk at position 0 opens the sequence.

        Raises DecodeFailed when the batch failed: the KV of every sequence in it is then unknown.
        """
        ...

    def decode_batch(self, items: Sequence[DecodeItem]) -> list[StepResult]:
        """Run one row for each of several sequences as one batch. Raises DecodeFailed as ``prefill``."""
        ...

    def release(self, session: int | str, epoch: int) -> None:
        """Forget a sequence and give its KV back; unknown ones are no error."""
        ...

    @property
    def kv_tokens(self) -> int:
        """Rows of KV held over all sequences, in tokens."""
        ...


@runtime_checkable
class ParkingEngine(BatchEngine, Protocol):
    """An engine that can set a sequence aside, out of its KV cache, and take it back. ``facts.can_park`` says so.

    A parked sequence keeps its name ``(session, epoch)``; ``release`` forgets it there too. It is taken back whole:
    KV, the sampler's history, the token to feed back and the number of its next draw.
    """

    def park(self, session: int | str, epoch: int) -> bool:
        """Move a sequence to host memory; it counts no longer in ``kv_tokens``. False where it is not there or there
        is no memory for it: nothing is parked then.
        """
        ...

    def restore(self, session: int | str, epoch: int, new_session: int | str, new_epoch: int) -> bool:
        """Take a parked sequence back under a new name. False where that fails: its state is gone, and rows for it
        are cache misses.
        """
        ...

    @property
    def parked_bytes(self) -> int:
        """Host memory that parked sequences take."""
        ...


@runtime_checkable
class CopyingEngine(Protocol):
    """What an engine offers beside the contract where its facts say ``can_copy``."""

    def copy(self, item: CopyItem) -> bool:
        """Open a sequence with rows of another, which may run on; False, and nothing opened, where the KV of that
        one is gone. The new sequence must not be there, and the other must hold the rows.

        Afterwards a prefill chunk at position ``rows`` goes on. Together with what is released next, more KV may be
        held for a moment than the engine's budget.
        """
        ...
