"""Chooses the next token of every row of a batch."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from treadle_shared.engine import TokenLogprobs
from treadle_shared.sampling import SamplingParams
from treadle_worker.llama.logprobs import token_logprobs
from treadle_worker.llama.sampler import Candidates, SamplerChain, needs_chain
from treadle_worker.llama.sequence import Sequence

Logits = npt.NDArray[np.float32]

_MAX_LANES: Final = 8  # threads that draw side by side; 32 draws of 0.2 ms then take under a millisecond
_MIN_DRAWS_A_LANE: Final = 2  # waking a thread costs about as much as one draw


class Chooser:
    """Greedy rows share one arg max; the others go through their chains, side by side where there are many.

    A choice depends on its own row and chain alone, so neither the order nor the threads change it.
    """

    def __init__(self, api: Any, n_vocab: int, eog: Collection[int], threads: int) -> None:
        self._api = api
        self._n_vocab = n_vocab
        self._eog = frozenset(eog)
        self._eog_ids: npt.NDArray[np.intp] = np.array(sorted(eog), np.intp)
        self._lanes = [Candidates(api, n_vocab) for _ in range(min(threads, _MAX_LANES))]
        self._pool = ThreadPoolExecutor(max(len(self._lanes) - 1, 1), "sampler") if len(self._lanes) > 1 else None

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()

    def new_chain(self, params: SamplingParams) -> SamplerChain | None:
        """The chain that these parameters need, or None where an arg max does."""
        if not needs_chain(params):
            return None
        return SamplerChain(self._api, self._n_vocab, params, self._eog)

    def choose(self, sequences: list[Sequence], logits: Logits) -> list[int]:
        """One token for each sequence from its row; ``logits`` has shape (len(sequences), n_vocab)."""
        tokens = self._greedy(sequences, logits)
        draws = [row for row, sequence in enumerate(sequences) if sequence.chain is not None]
        if draws:
            self._draw(draws, sequences, logits, tokens)
        return tokens

    def logprobs(self, sequences: list[Sequence], tokens: list[int], logits: Logits) -> Iterable[TokenLogprobs | None]:
        """What each sequence asked about its chosen token."""
        if all(sequence.params.logprobs is None for sequence in sequences):
            return repeat(None, len(sequences))
        return [
            None if sequence.params.logprobs is None else token_logprobs(row, token, sequence.params.logprobs)
            for sequence, token, row in zip(sequences, tokens, logits, strict=True)
        ]

    def _greedy(self, sequences: list[Sequence], logits: Logits) -> list[int]:
        if all(sequence.chain is not None for sequence in sequences):
            return [-1] * len(sequences)
        tokens: list[int] = logits.argmax(axis=1).tolist()
        for row, sequence in enumerate(sequences):
            if sequence.params.ignore_eos and tokens[row] in self._eog:
                tokens[row] = self._masked_argmax(logits[row])
        return tokens

    def _masked_argmax(self, row: Logits) -> int:
        masked = row.copy()
        masked[self._eog_ids] = -np.inf
        return int(masked.argmax())

    def _draw(self, draws: list[int], sequences: list[Sequence], logits: Logits, tokens: list[int]) -> None:
        lanes = min(len(self._lanes), max(len(draws) // _MIN_DRAWS_A_LANE, 1))

        def work(lane: int) -> None:
            for row in draws[lane::lanes]:
                sequence = sequences[row]
                assert sequence.chain is not None
                tokens[row] = sequence.chain.draw(logits[row], sequence.next_draw, self._lanes[lane])

        others = [self._pool.submit(work, lane) for lane in range(1, lanes)] if self._pool else []
        work(0)
        for other in others:
            other.result()
