"""A request as the embedded scheduler takes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from treadle_shared.errors import InvalidRequest
from treadle_shared.sampling import SamplingParams

MAX_NEW_TOKENS = 1 << 20  # far above any context; a larger number is a mistake, not a wish


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One generation: ``prompt_tokens`` (token ids) continued by at most ``max_new_tokens`` tokens.

    ``priority``: higher goes first. ``queue_timeout_s`` bounds the wait, ``deadline_s`` the whole life, both
    from submission. Only requests of the same ``cache_salt`` share a prefix. Raises InvalidRequest naming the field.
    """

    session_id: str
    prompt_tokens: Sequence[int]
    max_new_tokens: int
    params: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    queue_timeout_s: float | None = None
    deadline_s: float | None = None
    cache_salt: str = ""

    def __post_init__(self) -> None:
        if not self.session_id:
            raise InvalidRequest("session_id", "must not be empty")
        if len(self.prompt_tokens) == 0:
            raise InvalidRequest("prompt", "must hold at least one token")
        if not 1 <= self.max_new_tokens <= MAX_NEW_TOKENS:
            raise InvalidRequest("max_tokens", f"must be between 1 and {MAX_NEW_TOKENS}, not {self.max_new_tokens}")
