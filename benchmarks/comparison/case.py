"""What is measured: a model's quantisation and the numerics it runs with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from make_quants import cache_folder, demo_model, make_quant

from comparison.errors import BenchmarkError

Numerics = Literal["exact", "fast"]
_OF_THE_PACKAGE: Final = "q4_1"  # the demo package's own file; the others are made from it


@dataclass(frozen=True, slots=True)
class Case:
    """``q4_1-exact`` and its like. llama-server runs every case the same way: as it does by itself."""

    quant: str
    numerics: Numerics

    @property
    def name(self) -> str:
        """As it is written in commands and results."""
        return f"{self.quant}-{self.numerics}"

    def model(self) -> Path:
        """The case's GGUF, made if it must be."""
        source = demo_model()
        return source if self.quant == _OF_THE_PACKAGE else make_quant(source, self.quant, cache_folder())


def parse_case(text: str) -> Case:
    """A Case from its name. Raises BenchmarkError."""
    quant, _, numerics = text.rpartition("-")
    if not quant or numerics not in ("exact", "fast"):
        raise BenchmarkError(f"{text}: a case is QUANT-exact or QUANT-fast, such as q4_1-exact")
    return Case(quant.lower(), "exact" if numerics == "exact" else "fast")
