"""The figures that a suite is judged by, and how they are shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Figure:
    """``key`` in the results; ``title`` with its unit; ``digits`` after the point. ``rated``: worth a ratio."""

    key: str
    title: str
    digits: int = 0
    higher_is_better: bool = False
    rated: bool = False


TOKENS_PER_S: Final = Figure("tokens_per_s", "generated tok/s", 1, higher_is_better=True, rated=True)
TTFT_P50: Final = Figure("ttft_ms_p50", "TTFT p50, ms", rated=True)
TTFT_P99: Final = Figure("ttft_ms_p99", "TTFT p99, ms")
ITL_P50: Final = Figure("itl_ms_p50", "ITL p50, ms", 1)
ITL_P99: Final = Figure("itl_ms_p99", "ITL p99, ms", rated=True)
ITL_MAX: Final = Figure("itl_ms_max", "ITL max, ms")
GOODPUT: Final = Figure("goodput", "goodput", 3, higher_is_better=True)
GOOD_PER_S: Final = Figure("good_per_s", "good requests/s", 2, higher_is_better=True, rated=True)
REFUSED: Final = Figure("refused", "refused")
REFUSAL_P99: Final = Figure("refusal_ms_p99", "refusal p99, ms", 1)
CUT: Final = Figure("cut", "given up")
FAILED: Final = Figure("failed", "failed")
OUTSIDE_CPU: Final = Figure("outside_cpu_s", "CPU outside the model, s", 2)
DRIVER_CPU: Final = Figure("driver_cpu_s", "driver CPU, s", 2)
PEAK_MIB: Final = Figure("peak_mib", "peak memory, MiB")
WALL_S: Final = Figure("wall_s", "wall time, s", 2, rated=True)
RATE: Final = Figure("rate_per_s", "arrivals/s", 2)
LONG_DONE: Final = Figure("long_done", "long prompts done", higher_is_better=True)
LONG_TTFT: Final = Figure("long_ttft_ms_p50", "TTFT of long prompts p50, ms")
FIRST_TTFT: Final = Figure("first_ttft_ms_p50", "TTFT of the first turn p50, ms", rated=True)
LATER_TTFT: Final = Figure("later_ttft_ms_p50", "TTFT of later turns p50, ms", rated=True)
LATER_TTFT_P99: Final = Figure("later_ttft_ms_p99", "TTFT of later turns p99, ms")

COSTS: Final = (OUTSIDE_CPU, DRIVER_CPU, PEAK_MIB)
CLOSED: Final = (TOKENS_PER_S, TTFT_P50, ITL_P50, ITL_P99, ITL_MAX, *COSTS)
OPEN: Final = (RATE, GOODPUT, GOOD_PER_S, TTFT_P50, TTFT_P99, ITL_P99, REFUSED, REFUSAL_P99, CUT, *COSTS)
LONG: Final = (ITL_P50, ITL_P99, ITL_MAX, TOKENS_PER_S, LONG_DONE, LONG_TTFT, *COSTS)
PREFIX: Final = (WALL_S, TTFT_P50, ITL_P99, *COSTS)
TURNS: Final = (FIRST_TTFT, LATER_TTFT, LATER_TTFT_P99, WALL_S, ITL_P99, *COSTS)
