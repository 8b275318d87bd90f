"""Token pieces to text, a character at a time."""

from __future__ import annotations

import codecs


class Detokenizer:
    """Turns the byte pieces of a token stream into text that never splits a character.

    A character whose bytes are not all there yet is held back; bytes that can no longer become one turn into
    U+FFFD as soon as that is certain. Joined, the deltas equal the decoded whole, except that a character
    still incomplete when the stream ends is never shown.
    """

    def __init__(self) -> None:
        self._held = b""

    def feed(self, piece: bytes) -> str:
        """The text that ``piece`` completes; empty where it completes none."""
        data = self._held + piece
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._held = data[used:]
        return text
