"""What the proof runs: prompts of many lengths, answered greedily and by seeded draws."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Final

import numpy as np

from treadle_shared.sampling import SamplingParams

_LENGTHS: Final = (33, 48, 65, 129, 200, 347, 513, 1200)
"""One over a common chunk (33, 65, 129, 513), past the length where flash attention parts (347 and more)."""
_SAMPLED_LENGTHS: Final = (33, 65, 129, 347)
_QUICK_LENGTHS: Final = (33, 65)
_TINY_LENGTHS: Final = (1, 2, 3)  # a prompt of one token is the only prompt row that runs alone
_LOGPROBS: Final = 5
_SEED: Final = 33  # any fixed number


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """A prompt, how its answer is chosen, and how many decode rows follow the prompt."""

    name: str
    prompt: tuple[int, ...]
    params: SamplingParams
    steps: int


class Jobs:
    """Every job of a proof. ``greedy``, ``sampled`` and ``tiny`` are in rising order of length."""

    def __init__(self, n_vocab: int, context_tokens: int, quick: bool) -> None:
        self._random = np.random.default_rng(_SEED)
        self._n_vocab = n_vocab
        lengths, sampled = (_QUICK_LENGTHS, _QUICK_LENGTHS[:1]) if quick else (_LENGTHS, _SAMPLED_LENGTHS)
        steps = _quick_steps if quick else _steps
        fitting = [length for length in lengths if length + steps(length) < context_tokens]
        self.greedy = self._make(fitting, steps, greedy=True)
        self.sampled = self._make([length for length in sampled if length in fitting], steps, greedy=False)
        self.tiny = self._make(_TINY_LENGTHS, _quick_steps, greedy=True)

    @property
    def all(self) -> list[Job]:
        """All of them."""
        return [*self.greedy, *self.sampled, *self.tiny]

    def short(self, count: int, longest: int = 200) -> list[Job]:
        """``count`` jobs of at most ``longest`` tokens; they repeat where there are fewer."""
        fitting = [job for job in self._mixed() if len(job.prompt) <= longest]
        return list(islice(cycle(fitting), count))

    def longer_than(self, chunk: int, count: int) -> list[Job]:
        """Up to ``count`` of the shortest jobs, greedy and sampled, that do not fit one chunk."""
        fitting = [job for job in (*self.greedy, *self.sampled) if len(job.prompt) > chunk]
        return sorted(fitting, key=lambda job: len(job.prompt))[:count]

    def _mixed(self) -> list[Job]:
        """Greedy and sampled jobs in turn, then the tiny ones."""
        pairs = zip(self.greedy, self.sampled, strict=False)
        rest = self.greedy[len(self.sampled) :]
        return [*(job for pair in pairs for job in pair), *rest, *self.tiny]

    def _make(self, lengths: Sequence[int], steps: Callable[[int], int], greedy: bool) -> list[Job]:
        return [self._job(length, steps(length), greedy) for length in lengths]

    def _job(self, length: int, steps: int, greedy: bool) -> Job:
        prompt = tuple(self._random.integers(0, self._n_vocab, length).tolist())
        kind = "greedy" if greedy else "sampled"
        return Job(f"{kind} prompt of {length}", prompt, _greedy() if greedy else _sampled(length), steps)


def session_tokens(quick: bool) -> int:
    """Context that the longest job needs."""
    lengths, steps = (_QUICK_LENGTHS, _quick_steps) if quick else (_LENGTHS, _steps)
    return max(length + steps(length) for length in lengths) + 1


def _steps(length: int) -> int:
    return 12 if length <= 200 else 6


def _quick_steps(_length: int) -> int:
    return 4


def _greedy() -> SamplingParams:
    return SamplingParams(logprobs=_LOGPROBS, ignore_eos=True)


def _sampled(seed: int) -> SamplingParams:
    return SamplingParams(
        temperature=0.9, top_p=0.95, repeat_penalty=1.1, seed=seed, logprobs=_LOGPROBS, ignore_eos=True
    )
