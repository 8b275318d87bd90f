"""What a scheduler remembers when nobody is live: what a fresh one needs to decide as it would have."""

from __future__ import annotations

import msgspec


class Marks(msgspec.Struct, frozen=True, kw_only=True):
    """Counters and memories that outlive sessions.

    ``tick_s`` and ``promises`` (absolute times, with their clients) are the retry estimator's; ``epochs`` the last
    epoch of each remembered ``(client, session_id)``, oldest first, ``epoch_floor`` the highest of the forgotten ones.
    """

    next_tick: int = 0
    next_gen: int = 0
    kv_drift: int = 0
    last_result_at: float = 0.0
    tick_s: float | None = None
    promises: list[tuple[float, str]] = []
    epoch_floor: int = -1
    epochs: list[tuple[str, str, int]] = []
