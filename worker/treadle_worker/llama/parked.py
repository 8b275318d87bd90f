"""Sequences that wait in host memory for their next turn in a slot."""

from __future__ import annotations

from dataclasses import dataclass

from treadle_worker.llama.context import LlamaContext, State
from treadle_worker.llama.sampler import CHAIN_BYTES
from treadle_worker.llama.sequence import Sequence

Name = tuple[int | str, int]
"""``(session, epoch)``."""


@dataclass(slots=True)
class _Parked:
    sequence: Sequence
    state: State

    @property
    def size(self) -> int:
        """Bytes; a sampler chain counts as the largest one."""
        return len(self.state) + (CHAIN_BYTES if self.sequence.chain is not None else 0)


class ParkedSequences:
    """KV as llama.cpp saves it, beside the sequence with its sampler chain, which stays as it is."""

    def __init__(self, context: LlamaContext) -> None:
        self._context = context
        self._parked: dict[Name, _Parked] = {}
        self.bytes_held = 0

    def save(self, name: Name, sequence: Sequence) -> bool:
        """Copy a sequence's KV out; False where there is no memory for it, or it is not all there yet."""
        if self._context.incomplete(sequence.place):
            return False
        try:
            parked = _Parked(sequence, self._context.save_state(sequence.place))
        except MemoryError:
            return False
        self._parked[name] = parked
        self.bytes_held += parked.size
        return True

    def load(self, name: Name, place: int) -> Sequence | None:
        """Copy a parked KV into an empty place, and give the sequence back; None where it is not there. Raises
        DecodeFailed where the KV does not fit; the sequence is lost then.
        """
        parked = self._take(name)
        if parked is None:
            return None
        try:
            self._context.load_state(place, parked.state)
        except Exception:
            parked.sequence.free()
            raise
        parked.sequence.place = place
        return parked.sequence

    def forget(self, name: Name) -> None:
        """Drop a parked sequence; an unknown one is no error."""
        parked = self._take(name)
        if parked is not None:
            parked.sequence.free()

    def forget_all(self) -> None:
        """Drop every parked sequence."""
        for name in list(self._parked):
            self.forget(name)

    def _take(self, name: Name) -> _Parked | None:
        parked = self._parked.pop(name, None)
        if parked is not None:
            self.bytes_held -= parked.size
        return parked
