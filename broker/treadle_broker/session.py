"""A session as the scheduler sees it: lengths and progress, never tokens."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from treadle_shared.outcome import DoneReason

DIGEST_BYTES = 16  # of one block of a prompt: at 128 bits two different ones never meet


class SessionKey(NamedTuple):
    """One session. Ids are scoped to their client; the epoch tells apart uses of the same id."""

    client: str
    session_id: str
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a client asks for, in lengths. Times are absolute on the scheduler's clock; None is no bound.

    ``emitted`` tokens of the answer came from an earlier broker and are rebuilt first. ``resumed``: accepted before,
    so the queue's bounds do not turn it away again. ``recipe``: what they were computed with, where that is known.
    ``prefix`` are the digests of the prompt's whole blocks, one after the other, each over everything before it too;
    empty where nothing may be shared, or the prompt is shorter than a block. ``watched``: its text may end it after any
    token (a stop string), which is seen outside.
    """

    client: str
    session_id: str
    prompt_tokens: int
    max_new_tokens: int
    priority: int = 0
    queue_deadline: float | None = None
    deadline: float | None = None
    emitted: int = 0
    resumed: bool = False
    recipe: str = ""
    prefix: bytes = b""
    watched: bool = False

    @property
    def need_tokens(self) -> int:
        """KV rows the whole generation may come to: prompt and new tokens."""
        return self.prompt_tokens + self.max_new_tokens


class State(Enum):
    """Where a session stands, by its confirmed results. PARKED: its turn is over and others have theirs; the last
    rows of the turn may still be in flight.
    """

    QUEUED = auto()
    PREFILLING = auto()
    DECODING = auto()
    RECOVERING = auto()
    PARKED = auto()
    DONE = auto()


TRANSITIONS: dict[State, frozenset[State]] = {
    State.QUEUED: frozenset({State.PREFILLING, State.DONE}),
    State.PREFILLING: frozenset({State.DECODING, State.RECOVERING, State.DONE}),
    State.DECODING: frozenset({State.PARKED, State.RECOVERING, State.DONE}),
    State.RECOVERING: frozenset({State.RECOVERING, State.DECODING, State.DONE}),
    State.PARKED: frozenset({State.DECODING, State.RECOVERING, State.DONE}),
    State.DONE: frozenset(),
}


class IllegalTransition(RuntimeError):  # noqa: N818  (a bug, never the caller's input)
    """A session was moved along an edge that TRANSITIONS does not have."""


@dataclass(slots=True, eq=False)
class Session:
    """Facts of one session.

    ``rows`` count KV rows, ``tokens`` generated tokens; *planned* ones are in a tick that was sent, *done* and
    *emitted* ones are confirmed by a result. Between the two lies what a failed tick takes back.
    ``replay`` is how many emitted tokens a rebuilt session must put back into the KV before it goes on;
    ``prefill_rows`` how many rows of its sequence are prefilled rather than decoded. ``misses`` counts rebuilds
    after an eviction since it last emitted a token. ``recipe`` is what its emitted tokens were computed with.
    ``turn_start`` is how many of its tokens were planned when its turn in a slot began. ``copied`` prompt rows were not
    run but copied, from slot and generation ``copied_from``; ``starts_alone`` once that has missed. ``cached``
    are those of the first time it began; later ones may be its own. ``chain`` goes on where the job's ``prefix`` ends:
    prompt and emitted tokens together, as far as they fill blocks.
    """

    key: SessionKey
    job: Job
    submitted_at: float
    state: State = State.QUEUED
    slot: int | None = None
    gen: int = -1
    started_at: float | None = None
    rows_planned: int = 0
    rows_done: int = 0
    tokens_planned: int = 0
    emitted: int = 0
    replay: int = 0
    prefill_rows: int = 0
    last_turn: int = 0
    strikes: int = 0
    lone_deaths: int = 0
    emitted_at_death: int = 0
    misses: int = 0
    recipe: str = ""
    turn_start: int = 0
    copied: int = 0
    copied_from: tuple[int, int] = (-1, -1)
    starts_alone: bool = False
    cached: int | None = None
    chain: bytes = b""
    reason: DoneReason | None = None

    def __post_init__(self) -> None:
        self.emitted = self.tokens_planned = self.emitted_at_death = self.job.emitted
        self.recipe = self.job.recipe
        self.chain = self.job.prefix

    def bind(self, recipe: str) -> None:
        """Its tokens, if it has any and nobody said otherwise, are taken for this recipe's."""
        if self.emitted and not self.recipe:
            self.recipe = recipe

    def is_of_another(self, recipe: str) -> bool:
        """Whether its tokens so far were computed with another recipe, so that it must not go on with this one."""
        return self.emitted > 0 and self.recipe not in ("", recipe)

    def move(self, state: State) -> None:
        """Enter ``state``. Raises IllegalTransition."""
        if state not in TRANSITIONS[self.state]:
            raise IllegalTransition(f"{self.key}: {self.state.name} to {state.name}")
        self.state = state

    @property
    def live(self) -> bool:
        """Whether it still owes its client a terminal answer."""
        return self.state is not State.DONE

    @property
    def active(self) -> bool:
        """Whether it left the queue and has not ended."""
        return self.state not in (State.QUEUED, State.DONE)

    @property
    def leaving(self) -> bool:
        """Whether every token it may have is planned: its slot is free for the next tick."""
        return self.tokens_planned >= self.job.max_new_tokens

    @property
    def turn_tokens(self) -> int:
        """Tokens it has planned in its present turn."""
        return self.tokens_planned - self.turn_start

    @property
    def prefill_left(self) -> int:
        """Rows of its sequence that still have to be prefilled."""
        return self.prefill_rows - self.rows_planned

    @property
    def wants_decode(self) -> bool:
        """Whether its next row is a decode row."""
        return self.rows_planned >= self.prefill_rows and not self.leaving

    @property
    def replays_next(self) -> bool:
        """Whether its next decode row puts back a token that was emitted before."""
        return self.rows_planned < self.job.prompt_tokens + self.replay

    @property
    def last_replay_next(self) -> bool:
        """Whether its next decode row is the last one put back: it samples the next new token."""
        return self.rows_planned == self.job.prompt_tokens + self.replay - 1

    @property
    def fruitless(self) -> bool:
        """Whether it has emitted nothing since the engine last died under it (or ever)."""
        return self.emitted == self.emitted_at_death

    def void_planned(self) -> None:
        """Take back what was planned and never ran."""
        self.rows_planned = self.rows_done
        self.tokens_planned = self.emitted

    def rebuild(self, replay_decode: bool) -> None:
        """Start the KV anew: prompt first, then the emitted tokens, decoded one by one or prefilled with it."""
        self.rows_planned = self.rows_done = 0
        self.tokens_planned = self.turn_start = self.replay = self.emitted
        self.prefill_rows = self.job.prompt_tokens + (0 if replay_decode else self.replay)
