"""Ways to move KV between sequences: copied prefixes, trimmed sequences, states put out and in again.

They are operations of the context, below the engine's contract, so the tokens are given: those of the outputs
expected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from treadle_worker.llama.batch import cut
from treadle_worker.llama.context import LlamaContext
from treadle_worker.verify.jobs import Job
from treadle_worker.verify.steps import Step, Tally

SLOTS: Final = 6  # sequences that these cases use at once
_DONOR: Final = 0
_STEPS_BEFORE: Final = 2  # decode rows of a sequence before it is copied from, or its state is put out
_STEPS_AFTER: Final = 4
_LONG: Final = 256  # tokens

Outputs = Mapping[Job, Sequence[Step]]


class Rows:
    """Runs rows of jobs on a context of its own."""

    def __init__(self, context: LlamaContext) -> None:
        self.context = context
        self.least = 2 if context.model.keeps_roles else 1  # prompt rows of one sequence that may run together

    def prefill(self, slot: int, job: Job, start: int = 0) -> Step:
        """The prompt from ``start`` on; what it puts out after its last token."""
        tokens = job.prompt[start:]
        at, logits = 0, np.empty((0, 0), np.float32)
        for size in cut(len(tokens), self.context.n_ubatch, self.least):
            self.context.fill(slot, start + at, tokens[at : at + size])
            at += size
            self.context.batch.output[size - 1] = 1
            logits = self.context.run(size, 1)
        return Step(np.array(logits[0]))

    def decode(self, slots: Sequence[int], job: Job, outputs: Sequence[Step], number: int) -> list[Step]:
        """The row of emitted token ``number`` in every slot as one batch; what each puts out."""
        token = outputs[number].token
        for row, slot in enumerate(slots):
            self.context.fill(slot, len(job.prompt) + number, [token or 0], row)
        self.context.batch.output[: len(slots)] = 1
        return [Step(np.array(row)) for row in self.context.run(len(slots), len(slots))]


def copied(rows: Rows, job: Job, outputs: Outputs, tally: Tally) -> None:
    """Prefixes of several lengths, taken from a sequence that is decoding; all then decode in one batch."""
    rows.context.forget_all()
    expected = outputs[job]
    found: dict[int, list[Step]] = {_DONOR: [rows.prefill(_DONOR, job)]}
    for number in range(_STEPS_BEFORE):
        found[_DONOR] += rows.decode([_DONOR], job, expected, number)
    cuts = _cuts(len(job.prompt), rows.least)
    for slot, length in enumerate(cuts, 1):
        rows.context.copy_prefix(_DONOR, slot, length)
        found[slot] = [rows.prefill(slot, job, length)]
    targets = range(1, 1 + len(cuts))
    _decode_on(rows, targets, job, expected, found)
    for slot, steps in found.items():
        name = f"{job.name}, the donor" if slot == _DONOR else f"{job.name}, {cuts[slot - 1]} tokens copied"
        tally.compare(name, expected[: len(steps)], steps)


def trimmed(rows: Rows, job: Job, outputs: Outputs, tally: Tally) -> None:
    """A sequence cut back behind its emitted tokens and into its prompt, which then runs again from there."""
    rows.context.forget_all()
    expected = outputs[job]
    rows.prefill(0, job)
    for length in _cuts(len(job.prompt), rows.least):
        for number in range(_STEPS_BEFORE):
            rows.decode([0], job, expected, number)
        rows.context.trim(0, length)
        steps = [rows.prefill(0, job, length)]
        tally.compare(f"{job.name}, trimmed to {length}", expected[:1], steps)


def parked(rows: Rows, job: Job, other: Job, outputs: Outputs, tally: Tally) -> None:
    """A state put out in mid-stream, its slot taken by another job, the state put into another slot."""
    rows.context.forget_all()
    expected = outputs[job]
    rows.prefill(0, job)
    for number in range(_STEPS_BEFORE):
        rows.decode([0], job, expected, number)
    state = rows.context.save_state(0)
    rows.context.forget(0)
    tally.compare(f"{other.name}, in its slot", outputs[other][:1], [rows.prefill(0, other)])
    restored = [2, SLOTS - 1]
    for slot in restored:
        rows.context.load_state(slot, state)
    found: dict[int, list[Step]] = {slot: [] for slot in restored}
    last = min(_STEPS_BEFORE + _STEPS_AFTER, job.steps)
    for number in range(_STEPS_BEFORE, last):
        for slot, step in zip(restored, rows.decode(restored, job, expected, number), strict=True):
            found[slot].append(step)
    for slot, steps in found.items():
        first = _STEPS_BEFORE + 1
        tally.compare(f"{job.name}, put into slot {slot}", expected[first : last + 1], steps, first)


def _cuts(length: int, least: int) -> list[int]:
    """Prefix lengths: the longest that leaves ``least`` rows, two in the middle, the shortest; of a long prompt the
    first two, because what is not copied must be run.
    """
    lengths = (length - least, length * 2 // 3, length // 3, least)
    return list(dict.fromkeys(lengths))[: 2 if length > _LONG else None]


def _decode_on(
    rows: Rows, targets: Sequence[int], job: Job, expected: Sequence[Step], found: dict[int, list[Step]]
) -> None:
    """The targets catch up with the donor, then all go on in one batch."""
    for number in range(_STEPS_BEFORE):
        for slot, step in zip(targets, rows.decode(targets, job, expected, number), strict=True):
            found[slot].append(step)
    everyone = [_DONOR, *targets]
    for number in range(_STEPS_BEFORE, min(_STEPS_BEFORE + _STEPS_AFTER, job.steps)):
        for slot, step in zip(everyone, rows.decode(everyone, job, expected, number), strict=True):
            found[slot].append(step)
