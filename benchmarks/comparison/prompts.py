"""Prompts as token ids, the same for every system: plain English words, drawn by a seeded generator."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

_TEXT: Final = """
the of and to in is that for it as was with be by on not he his but at are this have from or had an they which one you
were all her she there would their we him been has when who will no more if out so up said what its about than into them
can only other time new some could these two may first then do any like my now over such our man me even most made after
also did many before must through years where much your way well down should because long each just state people those
too how little good world make very year still see own work men day get here old life both between being under three
never know same last another while us off might great go come since against right came take used himself few house use
place during high without again home around small however found water river mountain engine letter morning winter garden
stone paper window silver market bridge forest island music
"""
WORDS: Final = tuple(_TEXT.split())

Tokenizer = Callable[[str], list[int]]
"""The token ids of a text, without any that mark a beginning or an end."""


class Prompts:
    """Draws texts. What is drawn depends on the seed and on the order of the calls alone."""

    def __init__(self, tokenize: Tokenizer, seed: int) -> None:
        self._tokenize = tokenize
        self.random = random.Random(seed)

    def words(self, count: int) -> list[int]:
        """The token ids of so many words."""
        return self._tokenize(" ".join(self.random.choices(WORDS, k=count)))

    def tokens(self, count: int) -> list[int]:
        """Exactly so many token ids."""
        drawn = self.words(count)  # a word takes one token or more
        return drawn[:count]
