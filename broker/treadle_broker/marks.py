"""What a scheduler remembers when nobody is live: what a fresh one needs to decide as it would have."""

from __future__ import annotations

import msgspec

from treadle_broker.pace import PaceMarks


class Marks(msgspec.Struct, frozen=True, kw_only=True):
    """Counters and memories that outlive sessions.

    ``tick_s`` is the retry estimator's mean; it promises nothing at rest. ``pace`` is what ticks were measured to cost.
    ``epochs`` are the last epoch of each remembered ``(client, session_id)``, oldest first, ``epoch_floor`` the highest
    of the forgotten ones. ``kept`` are slot, generation and chain of every cached prefix, least recently used first.
    """

    next_tick: int = 0
    next_gen: int = 0
    kv_drift: int = 0
    last_result_at: float = 0.0
    tick_s: float | None = None
    pace: PaceMarks = PaceMarks()
    epoch_floor: int = -1
    epochs: list[tuple[str, str, int]] = []
    kept: list[tuple[int, int, bytes]] = []
