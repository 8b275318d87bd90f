"""The reference engine: the batch contract over a full-shard adapter and a session cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from treadle_shared.bytevocab import EOS, FINGERPRINT
from treadle_shared.engine import CopyItem, DecodeItem, EngineFacts, PrefillItem, StepResult
from treadle_shared.errors import InvalidTick, PartialShardError
from treadle_shared.sampling import SamplingParams
from treadle_worker.reference.adapter import KvBoundaryAdapter, Span
from treadle_worker.reference.arithmetic import Floats
from treadle_worker.reference.cache import CachedSequence, SequenceKey, SessionCache
from treadle_worker.reference.sampler import Sampler
from treadle_worker.reference.warmup import warm_up


@dataclass(frozen=True, slots=True)
class _Run:
    """One item's rows; ``sequence`` None where its KV is gone."""

    item: PrefillItem | DecodeItem
    sequence: CachedSequence | None
    tokens: Sequence[int]
    emitted: int = 0

    @property
    def key(self) -> SequenceKey:
        return self.item.session, self.item.epoch


class KvBatchEngine:
    """A BatchEngine on a small random Llama: bit-identical results for any batch and any prefill chunking.

    A sequence whose KV was evicted yields ``cache_miss`` until a chunk at position 0 opens it again. Raises
    PartialShardError for an adapter that does not run every layer.
    """

    def __init__(
        self,
        adapter: KvBoundaryAdapter,
        cache: SessionCache,
        *,
        context_tokens: int,
        max_sequences: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if not adapter.is_full_shard:
            first, last = adapter.layer_range
            raise PartialShardError(f"layers [{first}, {last}) of {adapter.model.shape.n_layers} cannot sample tokens")
        self._adapter = adapter
        self._cache = cache
        self._clock = clock
        self._facts = _facts(adapter, context_tokens, max_sequences, clock)
        self.last_timings = (0.0, 0.0)

    @property
    def recipe_fingerprint(self) -> str:
        """A hash of the model's shape, seed and arithmetic, and of the bits it computes on this machine."""
        return self._facts.recipe_fingerprint

    @property
    def facts(self) -> EngineFacts:
        """What the model is and costs."""
        return self._facts

    @property
    def kv_tokens(self) -> int:
        """Rows of KV held over all sequences, in tokens."""
        return self._cache.tokens

    def prefill(self, items: Sequence[PrefillItem]) -> list[StepResult]:
        """Run prompt chunks, at most one for each sequence. Raises InvalidTick where one contradicts the cache."""
        _check_distinct(items)
        return self._step([self._chunk(item) for item in items])

    def decode_batch(self, items: Sequence[DecodeItem]) -> list[StepResult]:
        """Run one row for each of several sequences. Raises InvalidTick where one contradicts the cache."""
        _check_distinct(items)
        return self._step([self._row(item) for item in items])

    def release(self, session: int | str, epoch: int) -> None:
        """Forget a sequence and give its KV back; unknown ones are no error."""
        self._cache.release(session, epoch)

    def park(self, session: int | str, epoch: int) -> bool:
        """See ParkingEngine. The arrays stay where they are: only the account changes."""
        return self._cache.park(session, epoch)

    def restore(self, session: int | str, epoch: int, new_session: int | str, new_epoch: int) -> bool:
        """See ParkingEngine."""
        return self._cache.restore((session, epoch), (new_session, new_epoch))

    @property
    def parked_bytes(self) -> int:
        """See ParkingEngine."""
        return self._cache.parked_tokens * self._cache.layout.bytes_per_token

    def copy(self, item: CopyItem) -> bool:
        """Open a sequence with rows of another. See CopyingEngine."""
        sampler = Sampler(item.params or SamplingParams())
        sampler.feed(item.seen, 0)
        source = (item.source, item.source_epoch)
        return self._cache.copy(source, item.session, item.epoch, item.rows, sampler)

    def check(self) -> None:
        """Raise AssertionError where the cache's accounts do not add up."""
        self._cache.check()

    # ---- items to runs

    def _chunk(self, item: PrefillItem) -> _Run:
        self._check_room(item, item.start + len(item.tokens))
        if item.start == 0:
            opened = self._cache.put(item.session, item.epoch, Sampler(item.params or SamplingParams()))
            return _Run(item, opened, item.tokens, item.n_emitted)
        sequence = self._found(item, item.start)
        # a constant of the sequence, so a chunk that leaves it at 0 does not take it back
        emitted = max(item.n_emitted, sequence.sampler.emitted) if sequence else 0
        return _Run(item, sequence, item.tokens, emitted)

    def _row(self, item: DecodeItem) -> _Run:
        self._check_room(item, item.pos + 1)
        sequence = self._found(item, item.pos)
        if sequence is None:
            return _Run(item, None, ())
        token = sequence.sampler.last if item.token is None else item.token
        if token is None:
            raise InvalidTick(f"sequence {item.session}: no token was sampled that could be fed back")
        return _Run(item, sequence, (token,), sequence.sampler.emitted + 1)

    def _found(self, item: PrefillItem | DecodeItem, position: int) -> CachedSequence | None:
        sequence = self._cache.get(item.session, item.epoch)
        if sequence is not None and sequence.tokens != position:
            raise InvalidTick(f"sequence {item.session}: position {position}, the cache is at {sequence.tokens}")
        return sequence

    def _check_room(self, item: PrefillItem | DecodeItem, tokens: int) -> None:
        if tokens > self._facts.context_tokens:
            raise InvalidTick(f"sequence {item.session}: {tokens} tokens do not fit {self._facts.context_tokens}")

    # ---- one batch

    def _step(self, runs: list[_Run]) -> list[StepResult]:
        began = self._clock()
        in_use = frozenset(run.key for run in runs)
        fitting = [run for run in runs if self._cache.append(*run.key, len(run.tokens), keep=in_use)]
        logits = self._forward(fitting)
        forwarded = self._clock()
        results = [_result(run, logits) for run in runs]
        self.last_timings = (forwarded - began, self._clock() - forwarded)
        return results

    def _forward(self, runs: Sequence[_Run]) -> dict[SequenceKey, Floats | None]:
        """Run the rows; the logits of every run that was run, None where it asks for none."""
        if not runs:
            return {}
        tokens = np.concatenate([np.asarray(run.tokens, dtype=np.int64) for run in runs])
        ends = np.cumsum([len(run.tokens) for run in runs])
        sampled = [run.key for run in runs if run.item.sample]
        outputs = [int(end) - 1 for run, end in zip(runs, ends, strict=True) if run.item.sample]
        rows = self._adapter.forward(tokens, [_span(run) for run in runs], outputs)
        for run in runs:
            _sequence(run).sampler.feed(run.tokens, run.emitted)
        return {run.key: None for run in runs} | dict(zip(sampled, rows, strict=True))


def _facts(
    adapter: KvBoundaryAdapter, context_tokens: int, max_sequences: int, clock: Callable[[], float]
) -> EngineFacts:
    cost = warm_up(adapter, clock)
    return EngineFacts(
        recipe_fingerprint=adapter.model.fingerprint(cost.logits),
        n_vocab=adapter.model.shape.n_vocab,
        context_tokens=context_tokens,
        max_sequences=max_sequences,
        kv_bytes_per_token=adapter.kv_bytes_per_token,
        weight_bytes=adapter.model.weight_bytes,
        scratch_bytes_per_session=cost.scratch_bytes,
        min_prefill_rows=1,
        replay_decode=False,
        exact=True,
        tokenizer_fingerprint=FINGERPRINT,
        prefill_tokens_per_s=cost.prefill_tokens_per_s,
        decode_tick_s=cost.decode_tick_s,
        parked_bytes_per_token=adapter.kv_bytes_per_token,
        can_copy=True,
    )


def _check_distinct(items: Sequence[PrefillItem | DecodeItem]) -> None:
    if len({(item.session, item.epoch) for item in items}) < len(items):
        raise InvalidTick("a sequence has more than one item in a batch")


def _sequence(run: _Run) -> CachedSequence:
    assert run.sequence is not None, "a run without KV was taken into the batch"
    return run.sequence


def _span(run: _Run) -> Span:
    sequence = _sequence(run)
    return Span(sequence.kv, sequence.tokens - len(run.tokens), len(run.tokens))


def _result(run: _Run, logits: dict[SequenceKey, Floats | None]) -> StepResult:
    if run.key not in logits:
        return StepResult(*run.key, cache_miss=True)
    row = logits[run.key]
    if row is None:
        return StepResult(*run.key)
    sampler = _sequence(run).sampler
    token = sampler.choose(row)
    return StepResult(*run.key, token, eog=token == EOS, logprobs=sampler.logprobs(row, token))
