"""An engine whose tokens are a hash of everything that may decide them, so that any mistake shows in a token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from treadle_shared.engine import CopyItem, DecodeItem, EngineFacts, PrefillItem, StepResult
from treadle_shared.errors import DecodeFailed
from treadle_shared.sampling import SamplingParams

N_VOCAB = 64
EOG = 0
_MODULUS = (1 << 61) - 1
_GARBAGE = 0xBAD
_EOG_EVERY = 17  # one draw in so many ends the answer

PROMPT_ROW, EMITTED_ROW = 0, 1


Poison = Callable[[int, int], None]


class WorkerDied(Exception):  # noqa: N818  (an event of the model world)
    """The engine took its process with it."""


def mixed(state: int, token: int, kind: int) -> int:
    """The hash after one more row."""
    return (state * 1_000_003 + 8 * token + kind + 1) % _MODULUS


def drawn(state: int, params: SamplingParams, draw: int, seen: Sequence[int]) -> int:
    """Draw number ``draw`` after the rows that gave ``state``; penalties look at the newest tokens ``seen``."""
    point = mixed(mixed(state, draw, 5), params.seed or 0, 6)
    for token in seen[-params.penalty_last_n :] if params.penalised else ():
        point = mixed(point, token, 7)
    if point % _EOG_EVERY == 0 and not params.ignore_eos:
        return EOG
    return 1 + point % (N_VOCAB - 1)


def opening(recipe: str) -> int:
    """The hash before the first row."""
    return sum(recipe.encode()) + 1


def reference(
    prompt: Sequence[int], params: SamplingParams, max_new: int, facts: EngineFacts
) -> tuple[list[int], bool]:
    """The tokens of an undisturbed run, and whether it ends with an end-of-generation token."""
    state = opening(facts.recipe_fingerprint)
    for token in prompt:
        state = mixed(state, token, PROMPT_ROW)
    tokens: list[int] = []
    while len(tokens) < max_new:
        token = drawn(state, params, len(tokens), [*prompt, *tokens])
        if token == EOG:
            return tokens, True
        tokens.append(token)
        state = mixed(state, token, EMITTED_ROW if facts.replay_decode else PROMPT_ROW)
    return tokens, False


@dataclass(slots=True)
class _Sequence:
    params: SamplingParams
    state: int
    first: int
    rows: int = 0
    emitted: int = 0
    last: int | None = None
    lone_start: bool = False
    seen: list[int] = field(default_factory=list)
    states: list[int] = field(default_factory=list)

    def run(self, token: int, kind: int) -> None:
        """One more row."""
        self.state = mixed(self.state, token, kind)
        self.states.append(self.state)
        self.seen.append(token)
        self.rows += 1


class HashEngine:
    """A BatchEngine over hashes. A row that breaks the rules of ``facts`` (a lone prompt row under
    ``min_prefill_rows`` 2, an emitted token prefilled under ``replay_decode``) changes every later token.

    ``fail_decode`` and ``fail_prefill`` make the next such batch fail with that code, ``fail_park`` the next park and
    ``fail_restore`` the next restore; ``evict`` drops a sequence;
    ``poison`` is asked for each row, with the first token of its sequence and its position, and raises.
    """

    def __init__(self, facts: EngineFacts, poison: Poison | None = None) -> None:
        self.facts = facts
        self.fail_decode = 0
        self.fail_prefill = 0
        self.fail_park = False
        self.fail_restore = False
        self.parked: dict[tuple[int | str, int], _Sequence] = {}
        self.missing: set[tuple[int | str, int]] = set()  # evicted and not yet released
        self.busy_s = 0.0  # what its work would have taken, by its facts
        self._poison = poison
        self._sequences: dict[tuple[int | str, int], _Sequence] = {}

    @property
    def recipe_fingerprint(self) -> str:
        return self.facts.recipe_fingerprint

    @property
    def kv_tokens(self) -> int:
        return sum(sequence.rows for sequence in self._sequences.values())

    @property
    def sequences(self) -> int:
        """Sequences held."""
        return len(self._sequences)

    def evict(self, choice: int) -> bool:
        """Drop one sequence; False where there is none."""
        if not self._sequences:
            return False
        key = list(self._sequences)[choice % len(self._sequences)]
        del self._sequences[key]
        self.missing.add(key)
        return True

    def prefill(self, items: Sequence[PrefillItem]) -> list[StepResult]:
        for item in items:
            if item.start == 0:
                assert item.params is not None
                opened = _Sequence(item.params, opening(self.recipe_fingerprint), item.tokens[0])
                self._sequences[item.session, item.epoch] = opened
        for item in items:
            self._taste(item, range(item.start, item.start + len(item.tokens)))
        self.busy_s += sum(len(item.tokens) for item in items) / (self.facts.prefill_tokens_per_s or 1e9)
        code, self.fail_prefill = self.fail_prefill, 0
        self._maybe_fail(items, code)
        return [self._chunk(item) for item in items]

    def decode_batch(self, items: Sequence[DecodeItem]) -> list[StepResult]:
        for item in items:
            self._taste(item, range(item.pos, item.pos + 1))
        self.busy_s += self.facts.decode_tick_s
        code, self.fail_decode = self.fail_decode, 0
        self._maybe_fail(items, code)
        return [self._row(item) for item in items]

    def release(self, session: int | str, epoch: int) -> None:
        self._sequences.pop((session, epoch), None)
        self.parked.pop((session, epoch), None)
        self.missing.discard((session, epoch))

    def park(self, session: int | str, epoch: int) -> bool:
        assert self.facts.can_park
        failed, self.fail_park = self.fail_park, False
        sequence = None if failed else self._sequences.pop((session, epoch), None)
        if sequence is None:
            return False
        self.parked[session, epoch] = sequence
        return True

    def restore(self, session: int | str, epoch: int, new_session: int | str, new_epoch: int) -> bool:
        sequence = self.parked.pop((session, epoch))
        if self.fail_restore:
            self.fail_restore = False
            self.missing.add((new_session, new_epoch))
            return False
        self._sequences[new_session, new_epoch] = sequence
        return True

    @property
    def parked_bytes(self) -> int:
        return sum(
            self.facts.parked_bytes_each + sequence.rows * self.facts.parked_bytes_per_token
            for sequence in self.parked.values()
        )

    def copy(self, item: CopyItem) -> bool:
        assert self.facts.can_copy
        assert (item.session, item.epoch) not in self._sequences
        source = self._sequences.get((item.source, item.source_epoch))
        if source is None:
            self.missing.add((item.session, item.epoch))
            return False
        assert item.rows <= source.rows
        states = source.states[: item.rows]
        state = states[-1] if len(states) == item.rows else _GARBAGE
        params = item.params or SamplingParams()
        self._sequences[item.session, item.epoch] = _Sequence(
            params, state, source.first, item.rows, seen=list(item.seen), states=states
        )
        return True

    def _taste(self, item: PrefillItem | DecodeItem, positions: range) -> None:
        sequence = self._sequences.get((item.session, item.epoch))
        if self._poison is not None and sequence is not None:
            for position in positions:
                self._poison(sequence.first, position)

    def _maybe_fail(self, items: Sequence[PrefillItem | DecodeItem], code: int) -> None:
        """What a failed batch leaves in its sequences is anybody's guess."""
        if not code:
            return
        for number, item in enumerate(items):
            sequence = self._sequences.get((item.session, item.epoch))
            if sequence is not None:
                sequence.state = _GARBAGE
                sequence.states = [_GARBAGE] * len(sequence.states)
                sequence.rows += number % 2
        raise DecodeFailed(code, "injected")

    def _chunk(self, item: PrefillItem) -> StepResult:
        sequence = self._sequences.get((item.session, item.epoch))
        if sequence is None:
            return StepResult(item.session, item.epoch, cache_miss=True)
        assert sequence.rows == item.start
        self._judge_roles(sequence, item)
        for token in item.tokens:
            sequence.run(token, PROMPT_ROW)
        sequence.emitted = item.n_emitted
        return self._sampled(item, sequence)

    def _judge_roles(self, sequence: _Sequence, chunk: PrefillItem) -> None:
        if self.facts.replay_decode and chunk.n_emitted:
            sequence.state = _GARBAGE
        if self.facts.min_prefill_rows < 2:
            return
        if sequence.lone_start or (chunk.start > 0 and len(chunk.tokens) == 1):
            sequence.state = _GARBAGE
        sequence.lone_start = chunk.start == 0 and len(chunk.tokens) == 1

    def _row(self, item: DecodeItem) -> StepResult:
        sequence = self._sequences.get((item.session, item.epoch))
        if sequence is None:
            return StepResult(item.session, item.epoch, cache_miss=True)
        assert sequence.rows == item.pos
        token = sequence.last if item.token is None else item.token
        assert token is not None, "there is no token to feed back"
        kind = EMITTED_ROW if self.facts.replay_decode else PROMPT_ROW
        sequence.run(token, kind)
        sequence.emitted += 1
        return self._sampled(item, sequence)

    def _sampled(self, item: PrefillItem | DecodeItem, sequence: _Sequence) -> StepResult:
        if not item.sample:
            sequence.last = None
            return StepResult(item.session, item.epoch)
        sequence.last = drawn(sequence.state, sequence.params, sequence.emitted, sequence.seen)
        return StepResult(item.session, item.epoch, sequence.last, eog=sequence.last == EOG)
