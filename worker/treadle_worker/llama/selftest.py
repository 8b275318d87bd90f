"""A short proof, on the loaded model, that a sequence's logits do not depend on what runs beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from treadle_worker.llama.batch import cut
from treadle_worker.llama.context import LlamaContext

Logits = npt.NDArray[np.float32]

_PROMPT: Final = 41  # tokens: over the 8 rows at which tiled kernels and the 4 at which repacked ones take over
_CHUNKS: Final = (2, 7, 32)  # the same prompt in pieces on both sides of those bounds
_WITH_LONE_ROWS: Final = (1, 7, 1, 32)  # where a prompt token may run alone
_STEPS: Final = 3  # decode rows after the prompt, so that their KV is read back too
_MAX_ROWS: Final = 16  # sequences decoded together: past every bound on rows known, and still short
_SEED: Final = 20_240_601  # any fixed number


@dataclass(frozen=True, slots=True)
class Verdict:
    """``exact``: every comparison was equal bit by bit, and nothing is known that would make longer ones differ;
    ``detail`` says what was compared, what differed or what is known.
    """

    exact: bool
    detail: str


class SelfTest:
    """Runs on scratch sequences of an idle context and leaves its KV empty."""

    def __init__(self, context: LlamaContext) -> None:
        self._context = context
        self._rows = min(context.max_sessions, _MAX_ROWS)
        self._least = 2 if context.model.keeps_roles else 1
        self._chunks: tuple[int, ...] = _CHUNKS if context.model.keeps_roles else _WITH_LONE_ROWS
        random = np.random.default_rng(_SEED)
        self._tokens = random.integers(0, context.model.n_vocab, (self._rows, _PROMPT + _STEPS), np.int32)

    def run(self) -> Verdict:
        """Compare one prompt run alone, in other chunks, and among other sequences. Raises DecodeFailed."""
        try:
            alone = self._alone((_PROMPT,))
            chunked = self._alone(self._chunks)
            beside = self._beside()
        finally:
            self._context.forget_all()
        return self._verdict(alone, chunked, beside)

    def _verdict(self, alone: list[Logits], chunked: list[Logits], beside: list[Logits]) -> Verdict:
        obstacles = self._context.model.obstacles
        for name, other in ((f"in chunks of {self._chunks}", chunked), (f"beside {self._rows - 1} sequences", beside)):
            difference = max(float(np.abs(a - b).max()) for a, b in zip(alone, other, strict=True))
            if not all(np.array_equal(a, b) for a, b in zip(alone, other, strict=True)):
                found = f"logits alone and {name} differ by up to {difference:.3g}"
                return Verdict(False, "; ".join([found, *obstacles]))
        if obstacles:
            return Verdict(False, "; ".join(obstacles))
        return Verdict(
            True,
            f"logits of {_PROMPT} prompt and {_STEPS} decode rows are equal bit by bit alone, "
            f"in chunks of {self._chunks}, and beside {self._rows - 1} sequences",
        )

    def _alone(self, chunks: tuple[int, ...]) -> list[Logits]:
        """Logits after the prompt and after each decode row, nothing else running."""
        self._context.forget_all()
        slot = self._rows - 1
        found = [self._prefill(slot, _PROMPT, chunks)]
        return found + [self._decode([slot], step)[0] for step in range(_STEPS)]

    def _beside(self) -> list[Logits]:
        """The same with a sequence in every other slot, each at another position."""
        self._context.forget_all()
        for slot in range(self._rows - 1):
            self._prefill(slot, self._length(slot), (self._length(slot),))
        found = [self._prefill(self._rows - 1, _PROMPT, (_PROMPT,))]
        return found + [self._decode(range(self._rows), step)[-1] for step in range(_STEPS)]

    def _length(self, slot: int) -> int:
        """Prompt length of a slot: the last one has the whole prompt, the others 2, 3 or 4 tokens."""
        return _PROMPT if slot == self._rows - 1 else 2 + slot % 3

    def _prefill(self, slot: int, length: int, chunks: tuple[int, ...]) -> Logits:
        context, start = self._context, 0
        logits = np.empty((0, 0), np.float32)
        for chunk in chunks:
            for size in cut(chunk, context.n_ubatch, self._least):
                context.fill(slot, start, self._tokens[slot, start : start + size])
                context.batch.output[size - 1] = 1
                logits = context.run(size, 1)
                start += size
        assert start == length, f"chunks {chunks} do not make {length} tokens"
        return np.array(logits[0])

    def _decode(self, slots: range | list[int], step: int) -> Logits:
        """One row for each of ``slots``; logits of shape (len(slots), n_vocab)."""
        for row, slot in enumerate(slots):
            at = self._length(slot) + step
            self._context.fill(slot, at, self._tokens[slot, at : at + 1], row)
        self._context.batch.output[: len(slots)] = 1
        return self._context.run(len(slots), len(slots)).copy()
