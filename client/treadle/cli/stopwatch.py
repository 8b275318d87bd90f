"""When the tokens of a stream came, and what that says of a node."""

from __future__ import annotations

import time
from collections.abc import Callable


class Stopwatch:
    """Times one stream from its submission. Seconds."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._began = clock()
        self._last: float | None = None
        self.first_token_s: float | None = None
        self.between_tokens_s: list[float] = []
        self.tokens = 0

    def came(self, tokens: int) -> None:
        """So many tokens have come together; those after the first of a group took no time of their own."""
        if tokens <= 0:
            return
        now = self._clock()
        if self._last is None:
            self.first_token_s = now - self._began
        else:
            self.between_tokens_s.append(now - self._last)
        self.between_tokens_s += [0.0] * (tokens - 1)
        self._last = now
        self.tokens += tokens
