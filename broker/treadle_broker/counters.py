"""Totals and rates over the scheduler's life."""

from __future__ import annotations

from collections import Counter

from treadle_broker.rates import RateMeter
from treadle_shared.admission import AdmissionReason
from treadle_shared.outcome import DoneReason


class Counters:
    """Every submission ends in exactly one of these counts, or is still queued or active."""

    def __init__(self) -> None:
        self.submitted = 0
        self.ended: Counter[str] = Counter()
        self.rejected: Counter[str] = Counter()
        self.ticks = 0
        self.decode_ticks = 0
        self.occupancy_last = 0
        self.occupancy_max = 0
        self.prefill_tokens = 0
        self.decode_tokens = 0
        self.kv_rows_peak = 0
        self.cache_misses = 0
        self.stale_results = 0
        self.prefix_lookups = 0
        self.prefix_hits = 0
        self.prefix_prompt_tokens = 0
        self.prefix_hit_tokens = 0
        self._prefill_rate = RateMeter()
        self._decode_rate = RateMeter()

    def reject(self, reason: AdmissionReason) -> None:
        """One submission was refused."""
        self.submitted += 1
        self.rejected[reason.value] += 1

    def end(self, reason: DoneReason) -> None:
        """One session ended."""
        self.ended[reason.bucket] += 1

    def ran(self, decode_rows: int, prefill_tokens: int, now: float) -> None:
        """One part of a tick ran."""
        self.decode_tokens += decode_rows
        self.prefill_tokens += prefill_tokens
        self._decode_rate.add(decode_rows, now)
        self._prefill_rate.add(prefill_tokens, now)
        if decode_rows:
            self.decode_ticks += 1
            self.occupancy_last = decode_rows
            self.occupancy_max = max(self.occupancy_max, decode_rows)

    def begun(self, tokens: int, copied: int) -> None:
        """A sequence was begun, with ``copied`` of the tokens that it is to prefill from another one."""
        self.prefix_lookups += 1
        self.prefix_hits += copied > 0
        self.prefix_prompt_tokens += tokens
        self.prefix_hit_tokens += copied

    def closed(self, kv_rows: int) -> None:
        """A tick that computed something is complete, and left ``kv_rows`` live rows behind."""
        self.ticks += 1
        self.kv_rows_peak = max(self.kv_rows_peak, kv_rows)

    @property
    def occupancy_avg(self) -> float:
        """Decode rows a tick, over ticks that decoded."""
        return self.decode_tokens / self.decode_ticks if self.decode_ticks else 0.0

    @property
    def rejected_total(self) -> int:
        """Refused submissions."""
        return sum(self.rejected.values())

    @property
    def settled(self) -> int:
        """Submissions that are neither queued nor active."""
        return sum(self.ended.values()) + self.rejected_total

    def rates(self, now: float) -> tuple[float, float]:
        """Prefill and decode tokens a second."""
        return self._prefill_rate.rate(now), self._decode_rate.rate(now)
