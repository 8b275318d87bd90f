"""Where the texts of special tokens could come from what a user wrote."""

from __future__ import annotations

from collections.abc import Sequence


class SpecialTexts:
    """The texts that mean control tokens, and questions about a user's text and a rendered chat."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = tuple(text for text in texts if text)
        self._longest = max(map(len, self._texts), default=0)
        self._beginnings = frozenset(text[:end] for text in self._texts for end in range(1, len(text)))
        self._endings = frozenset(text[begin:] for text in self._texts for begin in range(1, len(text)))

    def occurs_in(self, content: str) -> bool:
        """Whether a special text is part of ``content``."""
        return any(text in content for text in self._texts)

    def may_touch(self, content: str) -> bool:
        """Whether ``content`` holds a special text, or could complete one together with its neighbours.

        Looks at the content as it is and without the white space around it, which templates like to trim.
        """
        return self.occurs_in(content) or any(map(self._could_complete, {content, content.strip()}))

    def count(self, text: str) -> int:
        """How many times special texts occur in ``text``, overlapping ones included."""
        return sum(_occurrences(text, special) for special in self._texts)

    def _could_complete(self, content: str) -> bool:
        if not content:
            return False
        if len(content) < self._longest and any(content in text for text in self._texts):
            return True
        lengths = range(1, min(len(content) + 1, self._longest))
        return any(content[-n:] in self._beginnings or content[:n] in self._endings for n in lengths)


def _occurrences(text: str, special: str) -> int:
    count, position = 0, text.find(special)
    while position >= 0:
        count, position = count + 1, text.find(special, position + 1)
    return count
