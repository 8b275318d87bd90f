"""What a proof found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec


class CaseResult(msgspec.Struct, frozen=True, kw_only=True):
    """One case: how many prompts ran, how many outputs were compared and how many were equal bit by bit.

    ``first`` is the first difference; ``skipped`` says why the case cannot run on this model, and is then all.
    """

    name: str
    prompts: int
    outputs: int
    equal: int
    seconds: float
    first: str = ""
    skipped: str = ""

    @property
    def exact(self) -> bool:
        """Whether every output was equal."""
        return bool(self.skipped) or 0 < self.outputs == self.equal


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A proof from start to end. ``self_test`` is what the engine found of itself at its start, ``lacks`` what is
    known to keep this model, as it runs here, from being exact.
    """

    model: str
    recipe: str
    build: str
    threads: int
    switches: dict[str, Any]
    self_test: bool
    self_test_detail: str
    lacks: Sequence[str]
    cases: Sequence[CaseResult]

    @property
    def exact(self) -> bool:
        """Whether the self-test and every case found exactness."""
        return self.self_test and bool(self.cases) and all(case.exact for case in self.cases)

    @property
    def verdict(self) -> str:
        """The finding in one line."""
        equal, outputs = sum(case.equal for case in self.cases), sum(case.outputs for case in self.cases)
        counts = f"{equal} of {outputs} outputs are equal bit by bit in {len(self.cases)} cases"
        if self.exact:
            return f"exact: {counts}"
        reasons = self.lacks if self.self_test else [f"self-test: {self.self_test_detail}"]
        return "; ".join([f"not exact: {counts}", *reasons])

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe, with ``exact`` and ``verdict``."""
        facts: dict[str, Any] = msgspec.to_builtins(self)
        return {"exact": self.exact, "verdict": self.verdict, **facts}
