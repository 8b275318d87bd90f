"""What the engine knows of one sequence."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import dataclass

from treadle_shared.sampling import SamplingParams
from treadle_worker.llama.sampler import SamplerChain


@dataclass(slots=True)
class Sequence:
    """``length`` rows are in the KV cache, at ``place``; ``last`` is the token sampled from the newest of them.

    ``origin`` is the position of the first emitted token, so the draw after a row at position p is number
    p + 1 - origin. ``chain`` is None where an arg max decides.
    """

    epoch: int
    params: SamplingParams
    chain: SamplerChain | None
    place: int
    length: int = 0
    origin: int = 0
    last: int = -1

    @property
    def next_draw(self) -> int:
        """The number of the next draw, counted from 0 at the first emitted token."""
        return max(self.length - self.origin, 0)

    def accept(self, tokens: Tokens[int]) -> None:
        """Tell the penalties which tokens ran; each token once, when its row runs."""
        if self.chain is not None:
            self.chain.accept(tokens)

    def free(self) -> None:
        """Give the sampler's memory back."""
        if self.chain is not None:
            self.chain.free()
            self.chain = None
