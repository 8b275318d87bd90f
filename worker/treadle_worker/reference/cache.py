"""The hot KV state of every session, within a byte budget."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from treadle_worker.reference.kv import KvLayout, SequenceKv
from treadle_worker.reference.sampler import Sampler

SequenceKey: TypeAlias = tuple[int | str, int]
"""``(session, epoch)``."""


@dataclass(slots=True, eq=False)
class CachedSequence:
    """What is kept of one ``(session, epoch)``: KV of its first ``tokens`` positions, and its sampler."""

    kv: SequenceKv
    sampler: Sampler
    tokens: int = 0


@dataclass(slots=True)
class SessionCache:
    """KV state keyed by ``(session, epoch)``: another epoch of a session never sees it.

    Cached tokens cost ``layout.bytes_per_token`` each and never more than ``budget_bytes`` together. Where
    room is needed the least recently used sequence is dropped whole. Parked sequences are counted apart and never
    dropped.
    """

    layout: KvLayout
    budget_bytes: int
    evictions: int = 0
    tokens: int = 0
    parked_tokens: int = 0
    _sequences: OrderedDict[SequenceKey, CachedSequence] = field(default_factory=OrderedDict)
    _parked: dict[SequenceKey, CachedSequence] = field(default_factory=dict)

    @property
    def bytes_used(self) -> int:
        """Bytes of every cached token."""
        return self.tokens * self.layout.bytes_per_token

    def __len__(self) -> int:
        return len(self._sequences)

    def get(self, session: int | str, epoch: int) -> CachedSequence | None:
        """The sequence, now the most recently used; None is a miss."""
        sequence = self._sequences.get((session, epoch))
        if sequence is not None:
            self._sequences.move_to_end((session, epoch))
        return sequence

    def put(self, session: int | str, epoch: int, sampler: Sampler) -> CachedSequence:
        """Open an empty sequence; one under the same key is forgotten."""
        self.release(session, epoch)
        sequence = CachedSequence(SequenceKv(self.layout), sampler)
        self._sequences[session, epoch] = sequence
        return sequence

    def append(self, session: int | str, epoch: int, tokens: int, keep: frozenset[SequenceKey] = frozenset()) -> bool:
        """Give a sequence room for ``tokens`` more and count them as cached.

        Others make room, least recently used first, but none in ``keep``. Where that is not enough they are
        spared, the sequence itself is dropped and False returned; False too where it was not there.
        """
        sequence = self.get(session, epoch)
        if sequence is None:
            return False
        if not self._make_room(tokens, keep | {(session, epoch)}):
            self._evict((session, epoch))
            return False
        sequence.kv.reserve(sequence.tokens + tokens)
        sequence.tokens += tokens
        self.tokens += tokens
        return True

    def copy(self, source: SequenceKey, session: int | str, epoch: int, tokens: int, sampler: Sampler) -> bool:
        """Open a sequence with the first ``tokens`` of another; False where that one is gone.

        Nothing makes room: together with what is released next the budget may be exceeded for a moment.
        """
        held = self.get(*source)
        if held is None:
            return False
        opened = self.put(session, epoch, sampler)
        opened.kv.take(held.kv, tokens)
        opened.tokens = tokens
        self.tokens += tokens
        return True

    def release(self, session: int | str, epoch: int) -> None:
        """Forget a sequence; an unknown one is no error."""
        sequence = self._sequences.pop((session, epoch), None)
        if sequence is not None:
            self.tokens -= sequence.tokens
        parked = self._parked.pop((session, epoch), None)
        if parked is not None:
            self.parked_tokens -= parked.tokens

    def park(self, session: int | str, epoch: int) -> bool:
        """Set a sequence aside; False where it is not there."""
        sequence = self._sequences.pop((session, epoch), None)
        if sequence is None:
            return False
        self._parked[session, epoch] = sequence
        self.tokens -= sequence.tokens
        self.parked_tokens += sequence.tokens
        return True

    def restore(self, parked: SequenceKey, key: SequenceKey) -> bool:
        """Take a sequence back under another key; False, and it is lost, where it is not there or others leave it no
        room.
        """
        sequence = self._parked.pop(parked, None)
        if sequence is None:
            return False
        self.parked_tokens -= sequence.tokens
        if not self._make_room(sequence.tokens, frozenset()):
            return False
        self._sequences[key] = sequence
        self.tokens += sequence.tokens
        return True

    def check(self) -> None:
        """Raise AssertionError where the accounts do not add up."""
        held = sum(sequence.tokens for sequence in self._sequences.values())
        assert held == self.tokens, f"{held} tokens are held, {self.tokens} are accounted for"
        assert self.parked_tokens == sum(sequence.tokens for sequence in self._parked.values())
        assert self.bytes_used <= self.budget_bytes, f"{self.bytes_used} bytes exceed {self.budget_bytes}"
        for key, sequence in self._sequences.items():
            assert sequence.tokens <= sequence.kv.capacity, f"{key}: {sequence.tokens} tokens have no room"

    def _make_room(self, tokens: int, keep: frozenset[SequenceKey]) -> bool:
        """Evict what is needed; nothing where that would not be enough."""
        missing = self.tokens + tokens - self.budget_bytes // self.layout.bytes_per_token
        if missing <= 0:
            return True
        victims = list(self._victims(missing, keep))
        if sum(self._sequences[key].tokens for key in victims) < missing:
            return False
        for key in victims:
            self._evict(key)
        return True

    def _victims(self, missing: int, keep: frozenset[SequenceKey]) -> Iterator[SequenceKey]:
        """Sequences to drop for ``missing`` tokens, least recently used first; empty ones would give nothing."""
        for key, sequence in self._sequences.items():
            if missing <= 0:
                return
            if key not in keep and sequence.tokens:
                missing -= sequence.tokens
                yield key

    def _evict(self, key: SequenceKey) -> None:
        self.tokens -= self._sequences.pop(key).tokens
        self.evictions += 1
