"""Long prompts among streams, prompts with a shared beginning, conversations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from comparison.experiment import Experiment
from comparison.job import Ask, Job
from comparison.loads import closed_loop, conversations, long_among_streams
from comparison.measures import Spread, in_group, measured
from comparison.names import PYTHON, SERVERS, TREADLE, TREADLE_ITL
from comparison.prompts import Prompts
from comparison.trace import Outcome, Trace
from comparison.treadle_system import known, knows

LONG_PROMPT: Final = 700
LONG_ANSWER: Final = 16
LONG_EVERY_S: Final = 4.0
LONGS: Final = 8
STREAMS: Final = 7
STREAM_PROMPT: Final = 100
STREAM_ANSWER: Final = 256
_LONG, _STREAM = "long", "stream"

PREFIX_WORDS: Final = 400
QUESTION_WORDS: Final = 20
PREFIX_REQUESTS: Final = 32
PREFIX_SESSIONS: Final = 16
PREFIX_ANSWER: Final = 32

CONVERSATIONS: Final = 8
TURNS: Final = 4
OPENING_TOKENS: Final = 120
TURN_TOKENS: Final = 40
TURN_ANSWER: Final = 48

SESSION_TOKENS: Final = 1024  # holds the longest of each load


def long_prompts(quick: bool) -> list[Experiment]:
    """A prompt of 700 tokens every four seconds among seven streams; the ITL figures are those of the streams."""
    steered = (TREADLE_ITL,) if knows("target_itl_ms") else ()
    return [
        Experiment(
            load="long among 7",
            paired=(TREADLE, *steered, *SERVERS),
            sessions=STREAMS + 1,
            session_tokens=SESSION_TOKENS,
            drive=_LongPrompts(3 if quick else LONGS),
            measure=_streams_and_longs,
        )
    ]


def shared_prefix(quick: bool) -> list[Experiment]:
    """32 questions of 20 words after the same 400, 16 at a time; the figure is the wall time."""
    return [
        Experiment(
            load="prefix 16",
            paired=(TREADLE, *SERVERS) if quick else (TREADLE, *SERVERS, PYTHON),
            sessions=PREFIX_SESSIONS,
            session_tokens=SESSION_TOKENS,
            drive=_prefixed,
            reuse=True,
            options=known({"cache_slots": 4}),
        )
    ]


def turns(quick: bool) -> list[Experiment]:
    """Eight conversations of four turns; the TTFT figures are those of the later turns."""
    return [
        Experiment(
            load="turns 8",
            paired=(TREADLE, *SERVERS),
            sessions=CONVERSATIONS,
            session_tokens=SESSION_TOKENS,
            drive=_converse,
            measure=_first_and_later_turns,
            reuse=True,
            options=known({"cache_slots": CONVERSATIONS}),
        )
    ]


class _LongPrompts:
    def __init__(self, count: int) -> None:
        self._count = count

    async def __call__(self, ask: Ask, prompts: Prompts) -> list[Trace]:
        longs = [Job(tuple(prompts.tokens(LONG_PROMPT)), LONG_ANSWER, _LONG) for _ in range(self._count)]
        return await long_among_streams(ask, _stream_jobs(prompts), longs, STREAMS, LONG_EVERY_S)


def _stream_jobs(prompts: Prompts) -> Iterator[Job]:
    while True:
        yield Job(tuple(prompts.tokens(STREAM_PROMPT)), STREAM_ANSWER, _STREAM)


def _streams_and_longs(traces: Sequence[Trace]) -> dict[str, Any]:
    longs = in_group(traces, _LONG)
    spread = Spread.of([trace.ttft_s for trace in longs if trace.ttft_s is not None])
    return measured(in_group(traces, _STREAM)) | {
        "long_done": sum(trace.outcome is Outcome.DONE for trace in longs),
        "long_ttft_ms_p50": spread.p50,
        "long_ttft_ms_max": spread.max,
    }


async def _prefixed(ask: Ask, prompts: Prompts) -> list[Trace]:
    prefix = prompts.words(PREFIX_WORDS)
    jobs = [Job((*prefix, *prompts.words(QUESTION_WORDS)), PREFIX_ANSWER) for _ in range(PREFIX_REQUESTS)]
    return await closed_loop(ask, jobs, PREFIX_SESSIONS)


async def _converse(ask: Ask, prompts: Prompts) -> list[Trace]:
    openings = [prompts.tokens(OPENING_TOKENS) for _ in range(CONVERSATIONS)]
    questions = [[prompts.tokens(TURN_TOKENS) for _ in range(TURNS)] for _ in range(CONVERSATIONS)]
    return await conversations(ask, openings, questions, TURN_ANSWER)


def _first_and_later_turns(traces: Sequence[Trace]) -> dict[str, Any]:
    first = in_group(traces, "turn 1")
    later = [trace for trace in traces if trace.group != "turn 1"]
    ttft = {"first": measured(first)["ttft_ms_p50"], "later": measured(later)["ttft_ms_p50"]}
    return measured(traces) | {
        "first_ttft_ms_p50": ttft["first"],
        "later_ttft_ms_p50": ttft["later"],
        "later_ttft_ms_p99": measured(later)["ttft_ms_p99"],
    }
