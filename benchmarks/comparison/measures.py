"""What the traces of one run say."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from comparison.trace import Outcome, Trace
from treadle_shared.concurrency import percentile

GOOD_TTFT_S: Final = 2.0
GOOD_ITL_P99_S: Final = 0.25


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles of some times, in milliseconds; None of nothing."""

    p50: float | None
    p99: float | None
    max: float | None

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        """The percentiles of ``seconds``."""
        if not seconds:
            return cls(None, None, None)
        return cls(*(1000 * percentile(seconds, share) for share in (0.5, 0.99, 1.0)))


def is_good(trace: Trace) -> bool:
    """Whether a request got its whole answer in time: TTFT and the p99 of its ITL within bounds."""
    if trace.outcome is not Outcome.DONE or trace.ttft_s is None:
        return False
    gaps = trace.gaps_s
    return trace.ttft_s <= GOOD_TTFT_S and (not gaps or percentile(gaps, 0.99) <= GOOD_ITL_P99_S)


def measured(traces: Sequence[Trace]) -> dict[str, Any]:
    """Flat figures of all traces. Times in milliseconds, except ``wall_s``.

    ``tokens_per_s`` counts what came between the first due time and the last arrival; ``goodput`` is the share of
    good requests in all that were due.
    """
    arrivals = [when for trace in traces for when, _ in trace.arrivals]
    began = min(trace.due for trace in traces)
    wall_s = max(arrivals, default=began) - began
    good = sum(is_good(trace) for trace in traces)
    refusals = [trace.latency_s or 0.0 for trace in traces if trace.outcome is Outcome.REFUSED]
    return {
        "requests": len(traces),
        **{outcome.value: _count(traces, outcome) for outcome in Outcome},
        "tokens": sum(trace.generated for trace in traces),
        "wall_s": wall_s,
        "tokens_per_s": sum(trace.generated for trace in traces) / wall_s if wall_s else 0.0,
        **_flat("ttft_ms", Spread.of([trace.ttft_s for trace in traces if trace.ttft_s is not None])),
        **_flat("itl_ms", Spread.of(gaps(traces))),
        **_flat("refusal_ms", Spread.of(refusals)),
        "goodput": good / len(traces),
        "good": good,
    }


def in_group(traces: Iterable[Trace], group: str) -> list[Trace]:
    """Those of one group."""
    return [trace for trace in traces if trace.group == group]


def gaps(traces: Iterable[Trace]) -> list[float]:
    """Every time between two tokens of one answer."""
    return [gap for trace in traces for gap in trace.gaps_s]


def first_failure(traces: Iterable[Trace]) -> str:
    """Why the first failed request failed; empty where none did."""
    return next((trace.why for trace in traces if trace.outcome is Outcome.FAILED), "")


def _count(traces: Iterable[Trace], outcome: Outcome) -> int:
    return sum(trace.outcome is outcome for trace in traces)


def _flat(name: str, spread: Spread) -> dict[str, float | None]:
    return {f"{name}_p50": spread.p50, f"{name}_p99": spread.p99, f"{name}_max": spread.max}
