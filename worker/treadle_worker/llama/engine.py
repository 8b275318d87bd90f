"""llama.cpp behind the engine contract: a batch is one ``llama_decode`` over several sequences."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from typing import Any, Final

from treadle_shared.config import NodeConfig
from treadle_shared.engine import CopyItem, DecodeItem, EngineFacts, PrefillItem, StepResult
from treadle_shared.errors import DecodeFailed, ModelError
from treadle_shared.sampling import SamplingParams
from treadle_worker.llama.batch import Piece, calls_alone, calls_packed
from treadle_worker.llama.chooser import Chooser
from treadle_worker.llama.context import LlamaContext, Logits
from treadle_worker.llama.facts import measure_facts
from treadle_worker.llama.library import load_library
from treadle_worker.llama.model import LlamaModel
from treadle_worker.llama.parked import ParkedSequences
from treadle_worker.llama.places import Places
from treadle_worker.llama.selftest import SelfTest, Verdict
from treadle_worker.llama.sequence import Sequence
from treadle_worker.llama.switches import SwitchChoice, choose_switches
from treadle_worker.pinning import usable_cpus

_INVALID_BATCH: Final = -1  # llama_decode's own code for a batch that contradicts itself
_UNTESTED: Final = Verdict(False, "numerics are fast; exactness is not promised and not tested")

Row = tuple[DecodeItem | PrefillItem, Sequence]

LogitsTap = Callable[[list[int | str], Logits], None]
"""Given the sessions of the rows and the rows, shape (len(sessions), n_vocab), valid during the call alone."""


def _unobserved(_value: Any) -> None:
    """Nobody watches the start."""


class LlamaEngine:
    """A BatchEngine over one GGUF. A sequence's session is its slot, a number in [0, ``facts.max_sequences``). Where it
    is among llama.cpp's sequences is the engine's own affair: those that decode are kept side by side.

    Construction loads the model, runs the self-test (exact numerics only) and a warm-up. ``on_progress`` gets
    the loaded fraction in [0, 1], ``on_phase`` the phases ``loading`` and ``testing``. ``last_timings`` are the
    seconds inside ``llama_decode`` and inside sampling of the last call; ``exact_detail`` says what the
    self-test found; ``device`` names where the layers are. ``choose`` decides the kernel switches. ``close``
    frees everything. ``on_logits``, where set, is called before tokens are chosen.

    Where the model keeps roles, every prompt chunk runs in calls of its own, and a lone row of a longer prompt is
    refused. Raises ModelError, WeightBudgetError or ConfigError.
    """

    def __init__(
        self,
        config: NodeConfig,
        on_progress: Callable[[float], None] = _unobserved,
        on_phase: Callable[[str], None] = _unobserved,
        choose: SwitchChoice = choose_switches,
    ) -> None:
        self.on_logits: LogitsTap | None = None
        self._exact = config.effective_numerics == "exact"
        self._engine_s = self._sample_s = 0.0
        self._sequences: dict[int | str, Sequence] = {}
        self._kv_tokens = 0
        self.threads = threads = config.threads or len(usable_cpus())
        library = load_library()
        on_phase("loading")
        self._model = LlamaModel(library, config, choose, on_progress)
        try:
            self._context = LlamaContext(self._model, config, threads)
        except Exception:
            self._model.close()
            raise
        self._chooser = Chooser(library.api, self._model.n_vocab, self._model.eog, threads)
        self._parked = ParkedSequences(self._context)
        self._eog = self._model.eog
        on_phase("testing")
        self._take_stock(config, threads)

    def _take_stock(self, config: NodeConfig, threads: int) -> None:
        try:
            verdict = SelfTest(self._context).run() if self._exact else _UNTESTED
            self._facts = measure_facts(self._model, self._context, config, threads, verdict.exact)
        except DecodeFailed as error:
            self.close()
            raise ModelError(f"{self._model.path}: the first {error}") from None
        self._places = Places(self._context.max_sequences, self._context.max_sessions, self._move_price())
        self.exact_detail = verdict.detail
        self.device = ",".join(device.name for device in self._model.devices) or "cpu"

    def _move_price(self) -> float:
        """What moving a sequence costs, in readings of the weights: its cache is read and written whole, and llama.cpp
        plans the batch anew, which counts as one more. A memory that is shared has no gaps, and one that cannot copy no
        moves.
        """
        if self._model.switches.unified_kv or not self._model.can_copy:
            return math.inf
        moved = 2 * self._facts.kv_bytes_per_token * self._context.tokens_per_sequence
        return 1 + moved / max(self._facts.weight_bytes, 1)

    def close(self) -> None:
        """Free sequences, context and model; the engine is unusable afterwards."""
        for session, sequence in list(self._sequences.items()):
            self.release(session, sequence.epoch)
        self._parked.forget_all()
        self._chooser.close()
        self._context.close()
        self._model.close()

    # ---- the contract

    @property
    def recipe_fingerprint(self) -> str:
        """See EngineFacts."""
        return self._facts.recipe_fingerprint

    @property
    def facts(self) -> EngineFacts:
        """What the loaded model is and costs."""
        return self._facts

    @property
    def model(self) -> LlamaModel:
        """The loaded weights and what is known of them."""
        return self._model

    @property
    def kv_tokens(self) -> int:
        """Rows of KV held over all sequences."""
        return self._kv_tokens

    @property
    def places(self) -> dict[int | str, int]:
        """The place of each session's sequence among llama.cpp's."""
        return {session: sequence.place for session, sequence in self._sequences.items()}

    @property
    def last_timings(self) -> tuple[float, float]:
        """Seconds inside ``llama_decode`` and inside sampling of the last call."""
        return self._engine_s, self._sample_s

    def prefill(self, items: Items[PrefillItem]) -> list[StepResult]:
        """See BatchEngine. Where the model keeps roles, a lone row of a longer prompt fails with code -1."""
        self._engine_s = self._sample_s = 0.0
        self._refuse_lone_rows(items)
        results = [StepResult(item.session, item.epoch, cache_miss=not self._open(item)) for item in items]
        held = [index for index, result in enumerate(results) if not result.cache_miss]
        for call in self._calls([len(items[index].tokens) for index in held]):
            self._prefill_call([(held[piece.item], items[held[piece.item]], piece) for piece in call], results)
        return results

    def decode_batch(self, items: Items[DecodeItem]) -> list[StepResult]:
        """See BatchEngine. Rows run in the order of their places, which lets llama.cpp take them as one micro-batch."""
        self._engine_s = self._sample_s = 0.0
        held = self._sequences
        rows = [(i, seq) for i in items if (seq := held.get(i.session)) is not None and seq.epoch == i.epoch]
        if not rows:
            return [_missed(item) for item in items]
        self._close_gap([sequence for _, sequence in rows])
        places = [sequence.place for _, sequence in rows]
        if len(rows) == len(items) and places == sorted(places):
            return self._decode_rows(rows)
        rows.sort(key=_place)
        ran = {(result.session, result.epoch): result for result in self._decode_rows(rows)}
        return [ran.get((item.session, item.epoch)) or _missed(item) for item in items]

    def release(self, session: int | str, epoch: int) -> None:
        """Forget a sequence and give its KV back; unknown ones are no error."""
        sequence = self._leave(session, epoch)
        if sequence is None:
            self._parked.forget((session, epoch))
        else:
            sequence.free()

    def park(self, session: int | str, epoch: int) -> bool:
        """See ParkingEngine."""
        sequence = self._sequences.get(session)
        if sequence is None or sequence.epoch != epoch or not self._parked.save((session, epoch), sequence):
            return False
        self._leave(session, epoch)
        return True

    def restore(self, session: int | str, epoch: int, new_session: int | str, new_epoch: int) -> bool:
        """See ParkingEngine."""
        assert new_session not in self._sequences, f"slot {new_session} is not empty"
        place = self._places.take(decodes_next=True)
        try:
            sequence = self._parked.load((session, epoch), place)
        except DecodeFailed:
            sequence = None
        if sequence is None:
            self._empty(place)
            return False
        sequence.epoch = new_epoch
        self._sequences[new_session] = sequence
        self._kv_tokens += sequence.length
        return True

    @property
    def parked_bytes(self) -> int:
        """See ParkingEngine."""
        return self._parked.bytes_held

    def _leave(self, session: int | str, epoch: int) -> Sequence | None:
        """Empty the place of a sequence; None where it is not there."""
        sequence = self._sequences.get(session)
        if sequence is None or sequence.epoch != epoch:
            return None
        del self._sequences[session]
        self._kv_tokens -= sequence.length
        self._empty(sequence.place)
        return sequence

    def _empty(self, place: int) -> None:
        self._context.forget(place)
        self._places.give_back(place)

    def copy(self, item: CopyItem) -> bool:
        """See CopyingEngine. llama.cpp takes note of it and copies when the next batch runs."""
        assert item.session not in self._sequences, f"slot {item.session} is not empty"
        source = self._sequences.get(item.source)
        if source is None or source.epoch != item.source_epoch or not self._context.begins(source.place):
            return False
        place = self._places.take(decodes_next=True) if item.params else self._places.take_last()
        try:
            self._context.copy_prefix(source.place, place, item.rows)
        except DecodeFailed:
            self._empty(place)
            raise
        params = item.params or SamplingParams()
        opened = Sequence(item.epoch, params, self._chooser.new_chain(params) if item.params else None, place)
        self._sequences[item.session] = opened
        self._grow(opened, item.rows)
        opened.accept(item.seen)
        return True

    # ---- sequences

    def _held(self, item: DecodeItem | PrefillItem) -> Sequence | None:
        sequence = self._sequences.get(item.session)
        return sequence if sequence is not None and sequence.epoch == item.epoch else None

    def _open(self, item: PrefillItem) -> bool:
        """Whether the item's sequence is there; a chunk at position 0 opens it, in place of an older one."""
        if item.start > 0:
            return self._held(item) is not None
        old = self._sequences.get(item.session)
        if old is not None:
            self.release(item.session, old.epoch)
        params = item.params or SamplingParams()
        place = self._places.take(decodes_next=item.sample)
        self._sequences[item.session] = Sequence(item.epoch, params, self._chooser.new_chain(params), place)
        return True

    def _refuse_lone_rows(self, items: Iterable[PrefillItem]) -> None:
        """A prompt of one token may run alone; a piece of one token of a longer prompt takes other kernels."""
        for item in items:
            lone = len(item.tokens) == 1 or item.start == 1
            if self._model.keeps_roles and item.start > 0 and lone:
                raise DecodeFailed(_INVALID_BATCH, f"slot {item.session}: a lone row of a longer prompt")

    def _close_gap(self, decoding: Items[Sequence]) -> None:
        """Move one of these where that makes their batch cheaper."""
        move = self._places.move_for(sorted(sequence.place for sequence in decoding))
        if move is None:
            return
        self._context.move(*move)
        self._places.moved(move)
        for sequence in decoding:
            if sequence.place == move.source:
                sequence.place = move.target

    def _grow(self, sequence: Sequence, length: int) -> None:
        self._kv_tokens += length - sequence.length
        sequence.length = length

    # ---- running

    def _calls(self, lengths: list[int]) -> list[list[Piece]]:
        if self._model.keeps_roles:
            return calls_alone(lengths, self._context.n_ubatch, 2)
        return calls_packed(lengths, self._context.n_batch)

    def _prefill_call(self, rows: list[tuple[int, PrefillItem, Piece]], results: list[StepResult]) -> None:
        """One ``llama_decode`` over pieces of prompts, then the draws of those that end in it."""
        end = 0
        sampled: list[tuple[int, Row]] = []
        held = self._sequences
        for index, item, piece in sorted(rows, key=lambda row: held[row[1].session].place):
            tokens = item.tokens[piece.offset : piece.offset + piece.size]
            sequence = held[item.session]
            end = self._context.fill(sequence.place, item.start + piece.offset, tokens, end)
            if piece.last and item.sample:
                self._context.batch.output[end - 1] = 1
                sampled.append((index, (item, sequence)))
        logits = self._run(end, len(sampled), [held[item.session] for _, item, _ in rows])
        for _, item, piece in rows:
            self._prefilled(self._sequences[item.session], item, piece)
        for (index, _), result in zip(sampled, self._sample([row for _, row in sampled], logits), strict=True):
            results[index] = result

    def _prefilled(self, sequence: Sequence, item: PrefillItem, piece: Piece) -> None:
        end = piece.offset + piece.size
        self._grow(sequence, item.start + end)
        sequence.origin = item.start + len(item.tokens) - item.n_emitted
        sequence.accept(item.tokens[piece.offset : end])

    def _decode_rows(self, rows: list[tuple[DecodeItem, Sequence]]) -> list[StepResult]:
        """One ``llama_decode`` with a row for each sequence, then their draws; results in order of ``rows``."""
        batch, count = self._context.batch, len(rows)
        tokens = [sequence.last if item.token is None else item.token for item, sequence in rows]
        batch.token[:count] = tokens
        batch.pos[:count] = [item.pos for item, _ in rows]
        batch.output[:count] = [item.sample for item, _ in rows]
        batch.assign_each([sequence.place for _, sequence in rows])
        sampled = [row for row in rows if row[0].sample]
        logits = self._run(count, len(sampled), [sequence for _, sequence in rows])
        grown = 0
        for token, (item, sequence) in zip(tokens, rows, strict=True):
            grown += item.pos + 1 - sequence.length
            sequence.length = item.pos + 1
            if sequence.chain is not None:
                sequence.chain.accept((token,))
        self._kv_tokens += grown
        results = self._sample(sampled, logits)
        if len(sampled) == count:
            return results
        drawn = iter(results)
        return [next(drawn) if item.sample else StepResult(item.session, item.epoch) for item, _ in rows]

    def _run(self, rows: int, outputs: int, sequences: Items[Sequence]) -> Any:
        """The logits of the flagged rows. After a failure the lengths are read back from the KV cache."""
        started = time.perf_counter()
        try:
            return self._context.run(rows, outputs)
        except DecodeFailed:
            for sequence in sequences:
                self._grow(sequence, self._context.length(sequence.place))
            raise
        finally:
            self._engine_s += time.perf_counter() - started

    def _sample(self, rows: Items[Row], logits: Any) -> list[StepResult]:
        """Draw for each sampled row; entry r of ``logits`` belongs to entry r of ``rows``."""
        if not rows:
            return []
        started = time.perf_counter()
        if self.on_logits is not None:
            self.on_logits([item.session for item, _ in rows], logits)
        sequences = [sequence for _, sequence in rows]
        tokens = self._chooser.choose(sequences, logits)
        logprobs = self._chooser.logprobs(sequences, tokens, logits)
        self._sample_s += time.perf_counter() - started
        results = []
        for token, logprob, (item, sequence) in zip(tokens, logprobs, rows, strict=True):
            sequence.last = token
            results.append(StepResult(item.session, item.epoch, token, token in self._eog, False, logprob))
        return results


def _place(row: tuple[DecodeItem, Sequence]) -> int:
    return row[1].place


def _missed(item: DecodeItem) -> StepResult:
    return StepResult(item.session, item.epoch, cache_miss=True)
