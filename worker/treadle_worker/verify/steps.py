"""What a sequence puts out, and whether two sequences put out the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from treadle_shared.engine import TokenLogprobs

Row = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One logits row of shape (n_vocab,), and the token chosen from it where one was."""

    logits: Row
    token: int | None = None
    logprobs: TokenLogprobs | None = None


class Tally:
    """Counts outputs compared and outputs equal, and keeps the first difference."""

    def __init__(self) -> None:
        self.prompts = 0
        self.outputs = 0
        self.equal = 0
        self.first = ""

    @property
    def counts(self) -> dict[str, Any]:
        """The fields of a result."""
        return {"prompts": self.prompts, "outputs": self.outputs, "equal": self.equal, "first": self.first}

    def compare(self, name: str, expected: Sequence[Step], actual: Sequence[Step], first_token: int = 0) -> None:
        """Hold one sequence's outputs against those expected; ``first_token`` is the number of the first of them."""
        self.prompts += 1
        for number, (mine, other) in enumerate(zip(expected, actual, strict=True), first_token):
            problem = difference(mine, other)
            self.record(f"{name}, token {number}: {problem}" if problem else "")

    def record(self, problem: str) -> None:
        """Count one output; an empty ``problem`` means that it was as expected."""
        self.outputs += 1
        self.equal += not problem
        self.first = self.first or problem


def difference(expected: Step, actual: Step) -> str:
    """How two outputs differ, in words; empty where they are the same bit by bit."""
    if not np.array_equal(expected.logits.view(np.uint32), actual.logits.view(np.uint32)):
        return _logits_difference(expected, actual)
    if actual.token is not None and actual.token != expected.token:
        return f"the logits are equal and {actual.token} was chosen for {expected.token}"
    if actual.token is not None and actual.logprobs != expected.logprobs:
        return "the logits are equal and the log probabilities differ"
    return ""


def _logits_difference(expected: Step, actual: Step) -> str:
    gap = np.abs(expected.logits - actual.logits)
    count = int((expected.logits.view(np.uint32) != actual.logits.view(np.uint32)).sum())
    text = f"{count} logits differ, by up to {float(gap.max()):.3g}"
    if actual.token is not None and actual.token != expected.token:
        text += f", and {actual.token} was chosen for {expected.token}"
    return text
