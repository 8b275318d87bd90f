"""The node's budget: every bound that admission and planning respect."""

from __future__ import annotations

from dataclasses import dataclass, fields

from treadle_shared.config import MIN_SESSION_TOKENS, NodeConfig
from treadle_shared.engine import EngineFacts
from treadle_shared.errors import ConfigError

_MAY_BE_ZERO = frozenset({"queue_depth", "scratch_bytes_per_session", "cache_slots"})
PREFIX_BLOCK_TOKENS = 16  # reuse goes by whole blocks: short enough for a system prompt, long enough to be worth a copy


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeBudget:
    """What one node may spend. Bytes unless said otherwise.

    ``weight_bytes`` resident weights; ``kv_bytes`` KV cache of live sessions, reserved whole at admission;
    ``scratch_bytes_per_session`` what a session costs outside KV, ``scratch_bytes`` the envelope over all
    active ones; ``queue_depth`` requests and ``queue_tokens`` prompt tokens that may wait; ``max_active``
    sessions at once; ``max_batch_size`` decode rows and ``max_prefill_tokens_per_tick`` prompt tokens a tick.
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
    cache_slots: int = 0
    prefix_block_tokens: int = PREFIX_BLOCK_TOKENS

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise ConfigError(field.name, f"must be an integer, not {value!r}")
            if value < (0 if field.name in _MAY_BE_ZERO else 1):
                raise ConfigError(field.name, f"must be positive, not {value}")

    @property
    def effective_active_cap(self) -> int:
        """Sessions that may be active at once: the tighter of the slot cap and the scratch cap."""
        if self.scratch_bytes_per_session == 0:
            return self.max_active
        return min(self.max_active, self.scratch_bytes // self.scratch_bytes_per_session)


def check_serves(config: NodeConfig, facts: EngineFacts) -> None:
    """Raise ConfigError for a budget under which not even the smallest session could ever run."""
    least = MIN_SESSION_TOKENS * facts.kv_bytes_per_token
    if config.kv_bytes is not None and config.kv_bytes < least:
        raise ConfigError("kv_bytes", f"{config.kv_bytes} hold no session: {MIN_SESSION_TOKENS} tokens take {least}")
    scratch = facts.scratch_bytes_per_session
    if config.scratch_bytes is not None and config.scratch_bytes < scratch:
        raise ConfigError("scratch_bytes", f"{config.scratch_bytes} hold no session: one takes {scratch}")
