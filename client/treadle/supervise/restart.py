"""Whether and when a child that died is started again."""

from __future__ import annotations

from typing import Final

from treadle_shared.errors import EXIT_CONFIG

FIRST_DELAY_S: Final = 0.2  # a crash that does not repeat costs clients less than the recovery itself
MAX_DELAY_S: Final = 10.0  # a child that cannot live costs a start every ten seconds at most
MAX_LIVED: Final = 2  # deaths that count of a child that could start: it waits 0.8 s at most, however often it dies
MAX_FRUITLESS: Final = 10  # deaths in a row without any progress; about a minute, then a person has to look


class RestartPolicy:
    """The deaths of one child: each without progress since the last doubles the wait."""

    def __init__(self) -> None:
        self._fruitless = 0

    @property
    def fruitless(self) -> int:
        """Deaths in a row without progress."""
        return self._fruitless

    def progressed(self) -> None:
        """The child got somewhere: what follows is a new story."""
        self._fruitless = 0

    def lived(self) -> None:
        """The child started as it should before it died: some request may kill it each time until that one is found."""
        self._fruitless = min(self._fruitless, MAX_LIVED)

    def died(self, code: int) -> float | None:
        """Seconds to wait before the next start; None where a restart cannot help."""
        self._fruitless += 1
        if code == EXIT_CONFIG or self._fruitless > MAX_FRUITLESS:
            return None
        return float(min(FIRST_DELAY_S * 2 ** (self._fruitless - 1), MAX_DELAY_S))
