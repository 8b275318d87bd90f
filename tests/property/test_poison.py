"""One session takes the worker down, or fails its batch, each time a certain row of it runs."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2

import pytest
from clientele import BLOCK, Wish, prefix_of
from hash_engine import N_VOCAB, Poison, WorkerDied
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scheduler_world import World

from treadle_broker.session import Job
from treadle_shared.budget import NodeBudget
from treadle_shared.engine import EngineFacts
from treadle_shared.errors import DecodeFailed
from treadle_shared.outcome import DoneReason
from treadle_shared.sampling import SamplingParams

_CULPRIT = N_VOCAB - 1  # the first token of the culprit's prompt, and of nobody else's
_MAX_TURNS = 3000  # far above what any of these nodes needs: the test must end even if the search does not


@dataclass(frozen=True)
class Scene:
    """Sessions of ``(prompt, new)`` tokens, of which number ``culprit`` is deadly from position ``deadly_from`` on.
    The first ``together`` are submitted at once, the others one every few turns.
    """

    sessions: list[tuple[int, int]]
    culprit: int
    deadly_from: int
    together: int
    depth: int
    max_active: int
    max_batch_size: int
    prefill_tokens: int
    kv_tokens: int
    min_prefill_rows: int
    replay_decode: bool
    slots: int = 0  # where sessions take turns in them
    park_bytes: int = 0
    cache_slots: int = 0

    @property
    def deadly(self) -> bool:
        """Whether the culprit ever gets to the deadly row: the last token is never run."""
        prompt, new = self.sessions[self.culprit]
        return prompt + new - 1 > self.deadly_from

    def wishes(self) -> list[Wish]:
        """What is submitted, in order."""
        return [self._wish(number, *lengths) for number, lengths in enumerate(self.sessions)]

    def _wish(self, number: int, prompt: int, new: int) -> Wish:
        first = _CULPRIT if number == self.culprit else number % 3 if self.cache_slots else number
        tokens = [first, *range(1, prompt)]
        client = f"c{number % 2}"
        job = Job(
            client=client,
            session_id=f"s{number}",
            prompt_tokens=prompt,
            max_new_tokens=new,
            prefix=prefix_of(client, tokens),
        )
        return Wish(job, tokens, SamplingParams(seed=number, ignore_eos=True))

    def world(self, fatal: type[Exception]) -> World:
        """A running node."""
        facts = EngineFacts(
            recipe_fingerprint="one",
            n_vocab=N_VOCAB,
            context_tokens=64,
            max_sequences=256,
            kv_bytes_per_token=1,
            weight_bytes=1,
            min_prefill_rows=self.min_prefill_rows,
            replay_decode=self.replay_decode,
            parked_bytes_per_token=1,
            can_copy=True,
        )
        budget = NodeBudget(
            weight_bytes=1,
            kv_bytes=self.kv_tokens,
            scratch_bytes=1,
            max_active=self.max_active,
            max_batch_size=self.max_batch_size,
            max_prefill_tokens_per_tick=self.prefill_tokens,
            kv_policy="optimistic" if self.slots else "reserve",
            slots=self.slots,
            slice_tokens=3,
            park_bytes=self.park_bytes,
            cache_slots=self.cache_slots,
            prefix_block_tokens=BLOCK,
        )
        world = World(budget, facts, self.depth, poison=_poison(self.deadly_from, fatal))
        world.start_worker()
        return world


def _poison(deadly_from: int, fatal: type[Exception]) -> Poison:
    def taste(first: int, position: int) -> None:
        if first == _CULPRIT and position >= deadly_from:
            raise DecodeFailed(2, "poison") if fatal is DecodeFailed else fatal

    return taste


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    """Small nodes with short answers, where slots change hands while last tokens are in flight."""
    new = st.sampled_from([1, 1, 2]) | st.integers(1, 16)
    sessions = draw(st.lists(st.tuples(st.integers(1, 8), new), min_size=1, max_size=14))
    return Scene(
        sessions=sessions,
        culprit=draw(st.integers(0, len(sessions) - 1)),
        deadly_from=draw(st.sampled_from([0, 0, 1, 3]) | st.integers(0, 12)),
        together=draw(st.integers(1, len(sessions))),
        depth=draw(st.integers(1, 2)),
        max_active=draw(st.integers(1, 3) | st.integers(1, 8)),
        max_batch_size=draw(st.sampled_from([8, 1, 3])),
        prefill_tokens=draw(st.sampled_from([1, 3, 8, 64])),
        kv_tokens=draw(st.sampled_from([64, 100, 400])),
        min_prefill_rows=draw(st.integers(1, 2)),
        replay_decode=draw(st.booleans()),
        slots=draw(st.sampled_from([0, 0, 1, 2, 3])),
        park_bytes=draw(st.sampled_from([0, 1000])),
        cache_slots=draw(st.sampled_from([0, 2])),
    )


def _run(scene: Scene, world: World) -> None:
    """Until everybody has ended; a dead worker is replaced at once."""
    wishes = scene.wishes()
    world.submit(wishes[: scene.together])
    latecomers = wishes[scene.together :]
    for turn in range(_MAX_TURNS):
        if not world.worker_up:
            world.start_worker()
        if latecomers and turn % 3 == 0:
            world.submit([latecomers.pop(0)])
        moved = world.turn()
        world.check()
        if not moved and world.worker_up and not latecomers:
            return
    pytest.fail("the culprit is never found")


def _check_ends(scene: Scene, world: World) -> None:
    ends = {client.job.session_id: client.ended for client in world.clients.sessions.values()}
    failed = {name: (end.reason, end.detail) for name, end in ends.items() if end.reason is not DoneReason.LENGTH}
    expected = {f"s{scene.culprit}": (DoneReason.FAILED, "poison")} if scene.deadly else {}
    assert failed == expected
    world.finish()


def _most_faults(scene: Scene) -> int:
    """How many losses it may take.

    Up to ``depth`` in which the culprit had emitted something since the one before: the tokens of the ticks in
    flight at the first. Two for the strikes that make it a suspect. From then on only a trial with it can fail:
    each time its group is halved, and the last group is itself, twice.
    """
    return scene.depth + 2 + ceil(log2(len(scene.sessions))) + 2


_SETTINGS = settings(deadline=None, max_examples=150, print_blob=True, suppress_health_check=[HealthCheck.too_slow])


@_SETTINGS
@given(scenes())
def test_a_session_that_kills_the_worker_fails_alone_after_few_deaths(scene: Scene) -> None:
    world = scene.world(WorkerDied)
    _run(scene, world)
    assert world.deaths <= _most_faults(scene)
    _check_ends(scene, world)


@_SETTINGS
@given(scenes())
def test_a_session_that_fails_its_batch_fails_alone_after_few_failures(scene: Scene) -> None:
    world = scene.world(DecodeFailed)
    _run(scene, world)
    assert world.deaths == 0
    assert world.faults <= _most_faults(scene)
    _check_ends(scene, world)


@pytest.mark.parametrize("together", [1, 2, 3, 8, 17, 32])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_culprit_among_n_suspects_is_found_in_log2_n_deaths(together: int, depth: int) -> None:
    for culprit in range(together):
        scene = Scene(
            sessions=[(4, 3)] * together,
            culprit=culprit,
            deadly_from=0,
            together=together,
            depth=depth,
            max_active=together,
            max_batch_size=256,
            prefill_tokens=1024,
            kv_tokens=7 * together,
            min_prefill_rows=2,
            replay_decode=True,
        )
        world = scene.world(WorkerDied)
        _run(scene, world)
        assert world.deaths <= 2 + ceil(log2(together)) + 2
        _check_ends(scene, world)
