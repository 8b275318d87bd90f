"""The systems by name."""

from __future__ import annotations

from typing import Final

TREADLE: Final = "treadle"
TREADLE_ITL: Final = "treadle target-itl"
UNIFIED: Final = "llama-server unified"
SPLIT: Final = "llama-server split"
PYTHON: Final = "llama-cpp-python server"
LIMIT: Final = "llama-batched-bench"

SERVERS: Final = (SPLIT, UNIFIED)
