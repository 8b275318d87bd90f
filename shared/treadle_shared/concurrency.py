"""What a concurrency sweep found: one result a level, and what the levels say together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from treadle_shared.errors import ConfigError

PLATEAU = 0.95  # the plateau begins within five per cent of the best throughput


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPlan:
    """The jobs of a sweep: ``jobs`` fixed prompts of ``prompt_tokens`` tokens, ``new_tokens`` generated for each.

    ``levels`` come out sorted and without repeats. Raises ConfigError naming what is not positive.
    """

    levels: tuple[int, ...] = (1, 2, 4, 8)
    jobs: int = 8
    prompt_tokens: int = 4
    new_tokens: int = 8

    def __post_init__(self) -> None:
        for name, value in (
            ("jobs", self.jobs),
            ("prompt_tokens", self.prompt_tokens),
            ("new_tokens", self.new_tokens),
        ):
            if value < 1:
                raise ConfigError(name, f"must be positive, not {value}")
        if not self.levels or min(self.levels) < 1:
            raise ConfigError("levels", f"must be positive, not {list(self.levels)}")
        object.__setattr__(self, "levels", tuple(sorted(set(self.levels))))

    def prompt(self, job: int, n_vocab: int) -> list[int]:
        """A job's fixed prompt: ids inside the vocabulary that differ between jobs and positions."""
        return [(7 + 131 * job + 17 * place + 3 * job * place) % n_vocab for place in range(self.prompt_tokens)]


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Milliseconds; None of nothing."""

    p50: float | None
    p99: float | None

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Percentiles:
        """The smallest values that 50 % and 99 % of ``seconds`` do not exceed, in milliseconds."""
        if not seconds:
            return cls(None, None)
        return cls(1000 * percentile(seconds, 0.50), 1000 * percentile(seconds, 0.99))

    def to_dict(self) -> dict[str, float | None]:
        """To three decimals."""
        return {"p50": _rounded(self.p50), "p99": _rounded(self.p99)}

    def __str__(self) -> str:
        return " / ".join("-" if value is None else f"{value:.1f}" for value in (self.p50, self.p99))


@dataclass(frozen=True, slots=True, kw_only=True)
class ConcurrencyResult:
    """One level. Occupancy averages over ticks that decoded; ``tokens_per_tick`` counts every row that ran
    (prefill and decode) over every tick; ``peak_kv_bytes`` is read at the end of each tick, after finished sessions
    released; ``tokens_per_s`` counts generated tokens of wall time. ``outputs`` are each job's tokens.
    """

    concurrency: int
    ticks: int
    avg_occupancy: float
    max_occupancy: int
    tokens_per_tick: float
    peak_kv_bytes: int
    kv_pressure: float
    tokens_per_s: float
    ttft_ms: Percentiles
    itl_ms: Percentiles
    cache_misses: int
    rejected_admissions: int
    outputs: dict[str, list[int]]

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe, floats to three decimals, without the outputs."""
        return {
            "concurrency": self.concurrency,
            "ticks": self.ticks,
            "avg_occupancy": _rounded(self.avg_occupancy),
            "max_occupancy": self.max_occupancy,
            "tokens_per_tick": _rounded(self.tokens_per_tick),
            "peak_kv_bytes": self.peak_kv_bytes,
            "tokens_per_s": _rounded(self.tokens_per_s),
            "ttft_ms": self.ttft_ms.to_dict(),
            "itl_ms": self.itl_ms.to_dict(),
            "kv_pressure": _rounded(self.kv_pressure),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ConcurrencySweep:
    """All levels, lowest first, and the tokens that each job gave alone."""

    levels: list[ConcurrencyResult]
    baseline: dict[str, list[int]]

    @property
    def saturation_concurrency(self) -> int:
        """The lowest level whose average occupancy no higher level exceeds."""
        return next(
            level.concurrency
            for place, level in enumerate(self.levels)
            if all(level.avg_occupancy >= higher.avg_occupancy for higher in self.levels[place + 1 :])
        )

    @property
    def throughput_plateau(self) -> int:
        """The lowest level within five per cent of the best tokens/s."""
        best = max(level.tokens_per_s for level in self.levels)
        return next(level.concurrency for level in self.levels if level.tokens_per_s >= PLATEAU * best)

    @property
    def corruption_free(self) -> bool:
        """Whether every job gave the same tokens at every level as it did alone; False where none was served."""
        return bool(self.baseline) and all(level.outputs == self.baseline for level in self.levels)

    @property
    def cache_misses(self) -> int:
        """Rows whose KV had been evicted, over all levels."""
        return sum(level.cache_misses for level in self.levels)

    @property
    def rejected_admissions(self) -> int:
        """Refused submissions, over all levels."""
        return sum(level.rejected_admissions for level in self.levels)

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe, floats to three decimals."""
        return {
            "levels": [level.to_dict() for level in self.levels],
            "saturation_concurrency": self.saturation_concurrency,
            "throughput_plateau": self.throughput_plateau,
            "corruption_free": self.corruption_free,
            "cache_misses": self.cache_misses,
            "rejected_admissions": self.rejected_admissions,
        }

    def table(self) -> str:
        """The figures for people."""
        head = f"{'sessions':>8} {'ticks':>6} {'occupancy':>13} {'tok/tick':>8} {'peak KV bytes':>13} {'tok/s':>8}"
        lines = [f"{head} {'TTFT p50/p99 ms':>17} {'ITL p50/p99 ms':>15} {'KV':>5}"]
        lines += [_line(level) for level in self.levels]
        lines.append(
            f"saturates at {self.saturation_concurrency}, throughput plateau from {self.throughput_plateau}; "
            f"{'no corruption' if self.corruption_free else 'CORRUPTED'}, {self.cache_misses} cache misses, "
            f"{self.rejected_admissions} rejections"
        )
        return "\n".join(lines)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` (0 to 1) of the values do not exceed (nearest rank); NaN of none."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _line(level: ConcurrencyResult) -> str:
    occupancy = f"{level.avg_occupancy:.3f} / {level.max_occupancy}"
    return (
        f"{level.concurrency:>8} {level.ticks:>6} {occupancy:>13} {level.tokens_per_tick:>8.3f} "
        f"{level.peak_kv_bytes:>13} {level.tokens_per_s:>8.1f} {level.ttft_ms!s:>17} {level.itl_ms!s:>15} "
        f"{level.kv_pressure:>5.0%}"
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
