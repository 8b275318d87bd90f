"""Stop strings over a stream of text deltas."""

from __future__ import annotations

from collections.abc import Sequence


class _Pattern:
    """One stop string and how far the stream has matched it (Knuth, Morris and Pratt's automaton)."""

    __slots__ = ("_fallback", "matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._fallback = _fallbacks(text)

    def step(self, character: str) -> bool:
        """Whether ``character`` completes the stop string."""
        text, matched = self.text, self.matched
        while matched and text[matched] != character:
            matched = self._fallback[matched]
        self.matched = matched + 1 if text[matched] == character else 0
        return self.matched == len(text)


class StopMatcher:
    """Cuts a stream before the stop string that completes first; of several that complete with the same
    character, before the one that began first.

    Text that may still become a stop string is held back, so that none is ever leaked in part; it comes out
    as soon as it cannot. ``matched`` is the stop string that was found, or empty. Costs one automaton step a
    character and stop string that has begun; a delta in which none begins costs one set test.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        self._patterns = [_Pattern(stop) for stop in dict.fromkeys(stops)]
        self._first = frozenset(stop[0] for stop in stops)
        self._held = ""
        self.matched = ""

    def feed(self, delta: str) -> str:
        """The text that is certain not to belong to a stop string; empty once ``matched`` is set."""
        if self.matched:
            return ""
        if not self._held and self._first.isdisjoint(delta):
            return delta
        text = self._held + delta
        for end, character in enumerate(delta, len(self._held) + 1):
            completed = [pattern for pattern in self._patterns if pattern.step(character)]
            if completed:
                return self._cut(text, end, completed)
        return self._hold(text)

    def finish(self) -> str:
        """The text still held back: the stream is over, so it is no stop string."""
        held, self._held = self._held, ""
        return held

    def _cut(self, text: str, end: int, completed: list[_Pattern]) -> str:
        self.matched = max((pattern.text for pattern in completed), key=len)
        self._held = ""
        return text[: end - len(self.matched)]

    def _hold(self, text: str) -> str:
        certain = len(text) - max(pattern.matched for pattern in self._patterns)
        self._held = text[certain:]
        return text[:certain]


def _fallbacks(text: str) -> list[int]:
    """For each n: the length of the longest proper prefix of ``text`` that also ends ``text[:n]``."""
    fallback = [0] * (len(text) + 1)
    length = 0
    for index in range(1, len(text)):
        while length and text[length] != text[index]:
            length = fallback[length]
        length += text[length] == text[index]
        fallback[index + 1] = length
    return fallback
