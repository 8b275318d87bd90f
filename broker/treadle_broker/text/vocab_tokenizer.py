"""The tokenizer of a GGUF model."""

from __future__ import annotations

import os
import re
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from treadle_broker.text.gguf import GgufVocab
from treadle_broker.text.metadata import ModelMetadata
from treadle_broker.text.tokenizer import Segment, utf8
from treadle_shared.errors import ModelError

_WINDOW: Final = 8192
"""Characters handed to llama.cpp at once where it cuts texts with ``std::regex``, which takes some 400 bytes of
stack for every character of a match: 30,000 exclamation marks overflow a stack of 8 MiB and kill the process."""

_LETTER: Final = r"[^\W\d_]"
_WORD_BREAK = re.compile(
    rf"(?<={_LETTER})(?= {_LETTER})"  # before the space before a word
    rf"|(?<=\n)(?={_LETTER})"  # between a line feed and a word
    rf"|(?<={_LETTER})(?=[\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f])"  # before a full-width mark that ends a clause
)
"""Places where pre-tokenizers cut by themselves, so that cutting there changes no token."""


class VocabTokenizer:
    """llama.cpp's tokenizer over a model file that is loaded without its weights.

    Raises ModelError with one sentence where the file cannot be used. See Tokenizer for the members.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not os.fspath(path):
            raise ModelError("no model file is named")
        self._vocab = vocab = GgufVocab(Path(path))
        pairs = vocab.metadata()
        self._metadata = ModelMetadata(pairs)
        self.name = self._metadata.name or Path(path).stem
        self.chat_template = pairs.get("tokenizer.chat_template", "")
        self.n_vocab = vocab.n_tokens
        self.bos, self.eos = vocab.special("bos"), vocab.special("eos")
        self.bos_text, self.eos_text = self._text(self.bos), self._text(self.eos)
        self.eog = vocab.eog()
        self._pieces = vocab.pieces()
        for token in self.eog:
            self._pieces[token] = b""
        self._read_special_tokens()
        self._head = array("i", [self.bos] if vocab.adds("bos") and self.bos >= 0 else [])
        self._tail = array("i", [self.eos] if vocab.adds("eos") and self.eos >= 0 else [])
        self._windowed = vocab.is_bpe()
        self._space_prefix = self._metadata.adds_space_prefix and not self._windowed
        self.fingerprint = vocab.fingerprint()

    @property
    def context_train(self) -> int:
        """The context the model was trained for, in tokens; 0 where it does not say."""
        return self._metadata.context_train

    def kv_bytes_per_token(self, kv_type: str) -> int:
        """Bytes of KV cache a token takes, estimated from the metadata; 0 where it does not say."""
        return self._metadata.kv_bytes_per_token(kv_type)

    def encode(self, text: str, field: str = "prompt") -> array[int]:
        """The ids of a text in which nothing is special, with BOS and EOS where the model wants them."""
        return self._head + self._tokenize(text, False, field) + self._tail

    def encode_segments(self, segments: Sequence[Segment], field: str = "messages") -> array[int]:
        """The ids of the joined segments; BOS leads where the model wants one, and once at most."""
        tokens = array("i")
        for text, special in segments:
            after_text = bool(tokens) and tokens[-1] not in self._matched_whole
            tokens += self._continue(text, special, field) if after_text else self._tokenize(text, special, field)
        return tokens if tokens[:1] == self._head else self._head + tokens

    def piece(self, token: int) -> bytes:
        """The bytes a token adds to the text; control tokens and those of ``eog`` add none."""
        return self._pieces[token]

    def close(self) -> None:
        """Free the vocabulary."""
        self._vocab.close()

    def _read_special_tokens(self) -> None:
        """User-defined tokens are matched in any text, so they are none that ``special`` could turn on."""
        special = self._vocab.with_attributes("CONTROL", "UNKNOWN")
        texts = {self._text(token) for token in special} - {""}
        self.special_texts: Sequence[str] = tuple(sorted(texts))
        self._special = re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)")
        self._matched_whole = frozenset(special).union(self._vocab.with_attributes("USER_DEFINED"))
        longest_text = max((len(text.encode()) for text in texts), default=1)
        self.max_piece_bytes = max(longest_text, *map(len, self._pieces))

    def _text(self, token: int) -> str:
        return self._vocab.text(token).decode("utf-8", "replace") if token >= 0 else ""

    def _continue(self, text: str, special: bool, field: str) -> array[int]:
        """The ids of a text that follows other text: without the space that would be put before a first one.

        A line feed put in front takes that space instead; its tokens are then removed.
        """
        if not self._space_prefix:
            return self._tokenize(text, special, field)
        line_feed = self._vocab.tokenize(b"\n", False)
        tokens = self._tokenize("\n" + text, special, field)
        if tokens[: len(line_feed)] == line_feed:
            return tokens[len(line_feed) :]
        return self._tokenize(text, special, field)

    def _tokenize(self, text: str, special: bool, field: str) -> array[int]:
        whole = utf8(text, field)
        if not self._windowed or len(text) <= _WINDOW:
            return self._vocab.tokenize(whole, special)
        tokens = array("i")
        for window in self._windows(text, special):
            tokens += self._vocab.tokenize(window.encode(), special)
        return tokens

    def _windows(self, text: str, special: bool) -> Iterator[str]:
        """The text in parts that llama.cpp's regular expressions can take."""
        start = 0
        while len(text) - start > _WINDOW:
            cut = self._cut(text, start, special)
            yield text[start:cut]
            start = cut
        yield text[start:]

    def _cut(self, text: str, start: int, special: bool) -> int:
        """The last place in the window that does not change the tokens; without one, the window's end."""
        limit = start + _WINDOW
        breaks: list[int] = [match.start() for match in _WORD_BREAK.finditer(text, start + 1, limit)]
        cut: int
        for cut in (*reversed(breaks), *range(limit, limit - self.max_piece_bytes, -1)):
            if not special or not self._splits_special(text, cut):
                return cut
        return limit

    def _splits_special(self, text: str, cut: int) -> bool:
        reach = self.max_piece_bytes
        near = self._special.finditer(text, max(0, cut - reach), cut + reach)
        return any(match.start() < cut < match.end() for match in near)
