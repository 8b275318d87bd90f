"""One answer's path from tokens to text."""

from __future__ import annotations

from collections.abc import Sequence

from treadle_broker.text.detokenizer import Detokenizer
from treadle_broker.text.stops import StopMatcher
from treadle_broker.text.tokenizer import Tokenizer


class AnswerText:
    """Feeds one session's emitted tokens through detokenisation and stop strings.

    ``chars`` counts the characters handed out so far. Fed the same tokens, two of them hand out the same text.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self._piece = tokenizer.piece
        self._detokenizer = Detokenizer()
        self._stops = StopMatcher(stops) if stops else None
        self.chars = 0

    @property
    def stop(self) -> str:
        """The stop string that ended the answer, or empty."""
        return self._stops.matched if self._stops else ""

    def feed(self, token: int) -> tuple[str, bool]:
        """The text that ``token`` adds, and whether a stop string is complete: the answer then ends with this
        text, and later tokens add none.
        """
        text = self._detokenizer.feed(self._piece(token))
        if self._stops is None:
            self.chars += len(text)
            return text, False
        text = self._stops.feed(text)
        self.chars += len(text)
        return text, bool(self._stops.matched)

    def finish(self) -> str:
        """The text held back for a stop string that did not come. An incomplete character is dropped."""
        text = self._stops.finish() if self._stops else ""
        self.chars += len(text)
        return text
