"""Closed loops: equal requests at several levels, and requests of mixed lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from comparison.experiment import Experiment
from comparison.job import Ask, Job
from comparison.loads import closed_loop
from comparison.names import PYTHON, SERVERS, TREADLE
from comparison.prompts import Prompts
from comparison.trace import Trace

LEVELS: Final = (1, 2, 4, 8, 16, 32)
STAGGERED_LEVELS: Final = (8, 16, 32)
PROMPT_TOKENS: Final = 100
NEW_TOKENS: Final = 64
SESSION_TOKENS: Final = 512  # holds the longest request of both loads
MIXED_PROMPTS: Final = (20, 300)
MIXED_ANSWERS: Final = (16, 128)
_WAVES: Final = {1: 6, 2: 5, 4: 4, 8: 3}  # requests for each caller; two where many callers make a level long
_MANY_WAVES: Final = 2


def closed(quick: bool) -> list[Experiment]:
    """Prompts of 100 tokens, answers of 64."""
    levels = (1, 8, 32) if quick else LEVELS
    return [_experiment(f"closed {level}", level, _Equal(level), () if quick else (PYTHON,)) for level in levels]


def staggered(quick: bool) -> list[Experiment]:
    """Prompts of 20 to 300 tokens, answers of 16 to 128."""
    levels = (8,) if quick else STAGGERED_LEVELS
    return [_experiment(f"staggered {level}", level, _Mixed(level), ()) for level in levels]


def mixed_job(prompts: Prompts) -> Job:
    """A request of random lengths."""
    prompt = prompts.tokens(prompts.random.randint(*MIXED_PROMPTS))
    return Job(tuple(prompt), prompts.random.randint(*MIXED_ANSWERS))


class _Equal:
    def __init__(self, level: int) -> None:
        self._level = level

    async def __call__(self, ask: Ask, prompts: Prompts) -> list[Trace]:
        count = self._level * _WAVES.get(self._level, _MANY_WAVES)
        jobs = [Job(tuple(prompts.tokens(PROMPT_TOKENS)), NEW_TOKENS) for _ in range(count)]
        return await closed_loop(ask, jobs, self._level)


class _Mixed:
    def __init__(self, level: int) -> None:
        self._level = level

    async def __call__(self, ask: Ask, prompts: Prompts) -> list[Trace]:
        count = self._level * (_MANY_WAVES + 1)  # the last callers work alone for a while, so the rest must outweigh it
        return await closed_loop(ask, [mixed_job(prompts) for _ in range(count)], self._level)


def _experiment(load: str, level: int, drive: _Equal | _Mixed, single: Sequence[str]) -> Experiment:
    return Experiment(
        load=load,
        paired=(TREADLE, *SERVERS),
        single=single,
        sessions=level,
        session_tokens=SESSION_TOKENS,
        drive=drive,
    )
