"""What came of one request, and when."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum


class Outcome(Enum):
    """How a request ended."""

    DONE = "done"
    REFUSED = "refused"  # the system said no
    FAILED = "failed"  # it broke off, or was answered with an error
    CUT = "cut"  # the benchmark stopped waiting


@dataclass(slots=True)
class Trace:
    """Times in seconds of one clock. ``due`` is when the load wanted the request sent: a system's delay in taking
    it counts as the system's. ``arrivals`` holds ``(when, tokens that came together)``.
    """

    due: float
    group: str = ""
    clock: Callable[[], float] = time.perf_counter
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    outcome: Outcome = Outcome.CUT
    ended: float | None = None
    why: str = ""

    def came(self, tokens: list[int]) -> None:
        """So many tokens have come together."""
        if tokens:
            self.arrivals.append((self.clock(), len(tokens)))
            self.tokens.extend(tokens)

    def end(self, outcome: Outcome, why: str = "") -> None:
        """Nothing more will come."""
        self.outcome = outcome
        self.why = why
        self.ended = self.clock()

    @property
    def generated(self) -> int:
        """Tokens that came."""
        return sum(count for _, count in self.arrivals)

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token."""
        return self.arrivals[0][0] - self.due if self.arrivals else None

    @property
    def latency_s(self) -> float | None:
        """Time to the end."""
        return None if self.ended is None else self.ended - self.due

    @property
    def gaps_s(self) -> list[float]:
        """Time between tokens; those that came together with another took none of their own."""
        gaps: list[float] = []
        before: float | None = None
        for when, count in self.arrivals:
            if before is not None:
                gaps.append(when - before)
            gaps += [0.0] * (count - 1)
            before = when
        return gaps
