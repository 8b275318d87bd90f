"""The node's budget: every bound that admission and planning respect."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from treadle_shared.config import MIN_SESSION_TOKENS, NodeConfig
from treadle_shared.engine import EngineFacts
from treadle_shared.errors import ConfigError

_MAY_BE_ZERO = frozenset(
    {
        "queue_depth",
        "scratch_bytes_per_session",
        "burst_prefill_tokens_per_tick",
        "target_itl_ms",
        "target_ttft_ms",
        "coalesce_ms",
        "slots",
        "park_bytes",
        "cache_slots",
    }
)
PREFIX_BLOCK_TOKENS = 8  # reuse goes by whole blocks: of a conversation few tokens are run again, and digests are cheap


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeBudget:
    """What one node may spend. Bytes unless said otherwise.

    ``weight_bytes`` resident weights; ``kv_bytes`` KV cache of live sessions, reserved whole at admission;
    ``scratch_bytes_per_session`` what a session costs outside KV, ``scratch_bytes`` the envelope over all
    active ones; ``queue_depth`` requests and ``queue_tokens`` prompt tokens that may wait; ``max_active``
    sessions at once; ``max_batch_size`` decode rows and ``max_prefill_tokens_per_tick`` prompt tokens a tick;
    ``burst_prefill_tokens_per_tick`` (0: no more than that) while more sessions wait for their first token than for
    the next, in proportion while fewer do but several or more than ten stream, and four times that while none waits
    for the next;
    ``target_itl_ms`` milliseconds between two tokens of a stream that prefill is held to (0: none);
    ``target_ttft_ms`` milliseconds to the first token: a request that others would make later is refused (0: none is);
    ``coalesce_ms`` milliseconds that tokens may wait to leave together with later ones (0: each leaves at once);
    ``longest_prefill_ms`` milliseconds that a tick may prefill for, by measurement.

    ``kv_policy`` ``reserve`` sets a session's whole KV aside before it runs. ``optimistic`` sets aside what it holds
    and room for ``slice_tokens`` more, and lets active sessions take turns of at least that many tokens in ``slots``
    sequences (0: as many as ``max_active``; only optimistic may have fewer); ``park_bytes`` is the host memory that
    those may take which wait for their next turn.

    ``cache_slots`` sequences keep prefixes of finished sessions, in blocks of ``prefix_block_tokens``, within what
    live ones leave of ``kv_bytes``; 0 turns every reuse off.

    Raises ConfigError naming the field that is negative, zero where that makes no sense, or not an integer.
    """

    weight_bytes: int
    kv_bytes: int
    scratch_bytes: int
    scratch_bytes_per_session: int = 0
    queue_depth: int = 256
    queue_tokens: int = 1 << 20
    max_active: int = 8
    max_batch_size: int = 256
    max_prefill_tokens_per_tick: int = 512
    burst_prefill_tokens_per_tick: int = 0
    target_itl_ms: int = 0
    target_ttft_ms: int = 0
    coalesce_ms: int = 0
    longest_prefill_ms: int = 5000
    kv_policy: Literal["reserve", "optimistic"] = "reserve"
    slots: int = 0
    slice_tokens: int = 32
    park_bytes: int = 0
    cache_slots: int = 0
    prefix_block_tokens: int = PREFIX_BLOCK_TOKENS

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "kv_policy":
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                raise ConfigError(field.name, f"must be an integer, not {value!r}")
            if value < (0 if field.name in _MAY_BE_ZERO else 1):
                raise ConfigError(field.name, f"must be positive, not {value}")
        self._check_policy()

    def _check_policy(self) -> None:
        if self.kv_policy not in ("reserve", "optimistic"):
            raise ConfigError("kv_policy", f"is reserve or optimistic, not {self.kv_policy!r}")
        if self.slots and self.kv_policy == "reserve" and self.slots < self.max_active:
            raise ConfigError("slots", "may be fewer than max_active only under the optimistic policy")

    @property
    def takes_turns(self) -> bool:
        """Whether sessions give up their slot to others, and get it back."""
        return self.kv_policy == "optimistic"

    @property
    def seats(self) -> int:
        """Sessions that may hold a slot at once: the tightest of the slots, the active ones and the scratch cap."""
        slots = min(self.slots or self.max_active, self.max_active)
        if self.scratch_bytes_per_session == 0:
            return slots
        return min(slots, self.scratch_bytes // self.scratch_bytes_per_session)

    @property
    def effective_active_cap(self) -> int:
        """Sessions that may be active at once: the tighter of the slot cap and the scratch cap, or, where they take
        turns, ``max_active`` as long as one of them can have a slot.
        """
        return self.max_active if self.takes_turns and self.seats > 0 else self.seats


def check_serves(config: NodeConfig, facts: EngineFacts) -> None:
    """Raise ConfigError for a budget under which not even the smallest session could ever run."""
    least = MIN_SESSION_TOKENS * facts.kv_bytes_per_token
    if config.kv_bytes is not None and config.kv_bytes < least:
        raise ConfigError("kv_bytes", f"{config.kv_bytes} hold no session: {MIN_SESSION_TOKENS} tokens take {least}")
    scratch = facts.scratch_bytes_per_session
    if config.scratch_bytes is not None and config.scratch_bytes < scratch:
        raise ConfigError("scratch_bytes", f"{config.scratch_bytes} hold no session: one takes {scratch}")
