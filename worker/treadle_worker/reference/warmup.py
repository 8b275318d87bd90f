"""A short run of a full-shard adapter that measures what a session and a tick cost."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from treadle_shared.bytevocab import BOS
from treadle_shared.sampling import SamplingParams
from treadle_worker.reference.adapter import KvBoundaryAdapter, Span
from treadle_worker.reference.arithmetic import Floats
from treadle_worker.reference.kv import SequenceKv
from treadle_worker.reference.sampler import Sampler

_PROMPT_TOKENS = 64  # enough rows to see the cost of a prefilled token, a few milliseconds in all
_DECODE_ROWS = 8  # the fastest counts: the others met a cold cache or another process
_SCRATCH_UNIT = 1024  # bytes; scratch is rounded up to it, so that a few stray bytes do not show


@dataclass(frozen=True, slots=True)
class WarmUp:
    """What the run measured: the prompt's logits, bytes, tokens per second, seconds."""

    logits: Floats
    scratch_bytes: int
    prefill_tokens_per_s: float
    decode_tick_s: float


def warm_up(adapter: KvBoundaryAdapter, clock: Callable[[], float]) -> WarmUp:
    """Prefill a prompt and decode rows on KV of its own; ``clock`` gives seconds."""
    kv = SequenceKv(adapter.kv_layout)
    kv.reserve(_PROMPT_TOKENS + _DECODE_ROWS + 1)
    sampler = Sampler(SamplingParams(temperature=1.0, repeat_penalty=1.1))
    began = clock()
    logits = adapter.forward(np.arange(_PROMPT_TOKENS), [Span(kv, 0, _PROMPT_TOKENS)])
    prefill_s = clock() - began
    times = []
    for position in range(_PROMPT_TOKENS, _PROMPT_TOKENS + _DECODE_ROWS):
        began = clock()
        _decode(adapter, kv, position, sampler)
        times.append(clock() - began)
    scratch = _peak_bytes(lambda: _decode(adapter, kv, _PROMPT_TOKENS + _DECODE_ROWS, sampler))
    return WarmUp(logits, scratch, _PROMPT_TOKENS / max(prefill_s, 1e-9), min(times))


def _decode(adapter: KvBoundaryAdapter, kv: SequenceKv, position: int, sampler: Sampler) -> None:
    logits = adapter.forward(np.array([BOS], dtype=np.int64), [Span(kv, position, 1)])
    sampler.feed([BOS], position)
    sampler.choose(logits[0])


def _peak_bytes(run: Callable[[], None]) -> int:
    """The most that ``run`` held at once beyond what was there before, as numpy and Python report it."""
    traced = tracemalloc.is_tracing()
    if not traced:
        tracemalloc.start()
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    run()
    peak = tracemalloc.get_traced_memory()[1] - before
    if not traced:
        tracemalloc.stop()
    return -(-peak // _SCRATCH_UNIT) * _SCRATCH_UNIT
