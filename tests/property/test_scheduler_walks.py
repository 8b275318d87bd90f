"""Long random walks over the scheduler: deeper states than hypothesis' examples reach, each repeatable by its seed."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec
import pytest
from clientele import BLOCK, Wish, following, prefix_of, resuming
from hash_engine import N_VOCAB
from scheduler_world import World

from treadle_broker.session import Job
from treadle_shared.budget import NodeBudget
from treadle_shared.engine import EngineFacts
from treadle_shared.sampling import SamplingParams

_KV_BYTES_PER_TOKEN = 3
_STEPS = 80
_WALKS = 100  # in each of the parametrised tests

_WEIGHTS: dict[str, tuple[int, ...]] = {
    "submit": (1, 2, 4, 6),
    "submit_group": (0, 1, 3),
    "resume": (0, 0, 1, 3),
    "cancel": (0, 1, 3),
    "stop": (0, 1, 2),
    "pass_time": (0, 1, 3),
    "plan": (6,),
    "work": (6,),
    "deliver": (6,),
    "run_on": (0, 2, 8),
    "fail": (0, 1, 1, 3),
    "evict": (0, 1, 2),
    "fail_move": (0, 0, 1),
    "tamper": (0, 1, 2),
    "forget_row": (0, 0, 1, 2),
    "lose_worker": (0, 1, 2),
    "start_worker": (4,),
    "late_result": (2,),
}
"""How often a walk takes each step: one of these weights, drawn for the walk."""

_TURNS_WEIGHTS: dict[str, tuple[int, ...]] = {
    "submit": (4, 8),
    "submit_group": (1, 3),
    "run_on": (4, 10),
    "fail": (0, 0, 1, 2),
    "evict": (0, 0, 1),
    "tamper": (0, 0, 1, 2),
    "lose_worker": (0, 0, 1),
}
"""The same where sessions take turns: a walk that gets so far that they do."""


class Walk:
    """One walk: everything random comes from its seed."""

    def __init__(self, seed: int, depth: int, *, turns: bool = False) -> None:
        self._random = random.Random(seed)
        self._turns = turns
        self.world = World(self._budget(), self._facts(), depth, recover_misses=self._random.random() < 0.5)
        self._steps: list[Callable[[], object]] = [getattr(self, f"_{name}") for name in _WEIGHTS]
        often = _WEIGHTS | (_TURNS_WEIGHTS if turns else {})
        self._weights = [self._random.choice(weights) for weights in often.values()]

    def run(self) -> None:
        """Walk, then let the node come to rest."""
        for _ in range(_STEPS):
            self._random.choices(self._steps, self._weights)[0]()
            self.world.check()
        self.world.finish()

    # ---- clients

    def _submit(self) -> None:
        self.world.submit([self._wish()])

    def _submit_group(self) -> None:
        self.world.submit([self._wish() for _ in range(self._random.randint(2, 4))])

    def _resume(self) -> None:
        self.world.submit([resuming(self._wish(), self._random.random(), self.world.facts)])

    def _cancel(self) -> None:
        if self.world.clients.sessions:
            self.world.cancel(self._random.choice(list(self.world.clients.sessions)))

    def _stop(self) -> None:
        if self.world.clients.sessions:
            self.world.stop(self._random.choice(list(self.world.clients.sessions)), self._random.randint(0, 3))

    def _pass_time(self) -> None:
        self.world.advance(self._random.choice([0.0, 0.01, 0.3, 1.0]))

    # ---- ticks

    def _plan(self) -> bool:
        return self.world.worker_up and self.world.plan()

    def _work(self) -> bool:
        return self.world.worker_up and self.world.work()

    def _deliver(self) -> bool:
        return self.world.deliver()

    def _run_on(self) -> None:
        for _ in range(self._random.randint(1, 4) if self.world.worker_up else 0):
            self.world.turn()
            self.world.check()

    # ---- faults

    def _fail(self) -> None:
        self.world.fail_next_batch(self._random.choice([1, -1, -3]), self._random.random() < 0.5)

    def _fail_move(self) -> None:
        self.world.fail_next_move(self._random.random() < 0.5)

    def _evict(self) -> None:
        self.world.evict(self._random.randrange(100))

    def _tamper(self) -> None:
        self.world.tamper()

    def _forget_row(self) -> None:
        self.world.forget_row(self._random.randrange(100))

    def _lose_worker(self) -> None:
        if self.world.worker_up:
            self.world.lose_worker(late_results=self._random.random() < 0.5)

    def _start_worker(self) -> None:
        if self.world.worker_up:
            return
        facts, known = self._facts(), self.world.facts
        if facts.recipe_fingerprint == known.recipe_fingerprint:
            facts = msgspec.structs.replace(
                facts, min_prefill_rows=known.min_prefill_rows, replay_decode=known.replay_decode
            )
        self.world.start_worker(
            facts if self.world.worker_known and self._random.random() < 0.3 else None,
            self._budget() if self._random.random() < 0.3 else None,
        )

    def _late_result(self) -> None:
        if self.world.late:
            self.world.deliver_late(self._random.randrange(100))

    # ---- what it draws

    def _budget(self) -> NodeBudget:
        draw = self._random
        turns = (draw.choice([0, 1, 2, 3]), draw.choice([1, 2, 3, 5]), draw.choice([0, 60, 1000, 1000, 1000]))
        return NodeBudget(
            weight_bytes=1,
            kv_bytes=draw.randint(*((12, 120) if self._turns else (8, 48))) * _KV_BYTES_PER_TOKEN + 1,
            scratch_bytes=draw.randint(4, 40),
            scratch_bytes_per_session=draw.choice([0, 0, 0, 4] if self._turns else [0, 4, 4]),
            queue_depth=draw.randint(0, 5),
            queue_tokens=draw.choice([12, 1000]),
            max_active=draw.randint(1, 7 if self._turns else 5),
            max_batch_size=draw.randint(1, 5),
            max_prefill_tokens_per_tick=draw.randint(1, 9),
            burst_prefill_tokens_per_tick=draw.choice([0, 0, 12]),
            target_ttft_ms=draw.choice([0, 0, 100, 2000]),
            coalesce_ms=draw.choice([0, 50, 1000]),
            kv_policy="optimistic" if self._turns else "reserve",
            slots=turns[0] if self._turns else 0,
            slice_tokens=turns[1],
            park_bytes=turns[2],
            cache_slots=draw.choice([0, 1, 3]),
            prefix_block_tokens=BLOCK,
        )

    def _facts(self) -> EngineFacts:
        draw = self._random
        return EngineFacts(
            recipe_fingerprint=draw.choice(["one", "one", "two"]),
            n_vocab=N_VOCAB,
            context_tokens=draw.randint(12, 40),
            max_sequences=draw.randint(3, 8),
            kv_bytes_per_token=_KV_BYTES_PER_TOKEN,
            weight_bytes=1,
            min_prefill_rows=draw.randint(1, 2),
            replay_decode=draw.random() < 0.5,
            prefill_tokens_per_s=100.0,
            decode_tick_s=draw.choice([0.0, 0.02]),
            parked_bytes_each=draw.choice([0, 5]),
            parked_bytes_per_token=draw.choice([0, 4, 4, 4]),
            park_tokens_per_s=draw.choice([0.0, 0.0, 0.0, 10.0, 90.0, 1000.0]),
            can_copy=draw.random() < 0.8,
        )

    def _wish(self) -> Wish:
        draw, now = self._random, self.world.now
        prompt = [
            draw.randrange(N_VOCAB) for _ in range(draw.choice([1, 2, 3, draw.randint(4, 14), draw.randint(4, 14)]))
        ]
        alike = draw.choice([0, 4, len(prompt) - 1, draw.randint(2, 13)])
        prompt[:alike] = range(min(alike, len(prompt)))
        client, shared = draw.choice("abc"), draw.random() < 0.9
        job = Job(
            client=client,
            session_id=f"s{draw.randrange(6)}",
            prompt_tokens=len(prompt),
            max_new_tokens=draw.choice([1, 2, draw.randint(1, 10)]) + draw.choice([0, 4, 9]) * self._turns,
            priority=draw.choice([0, 0, 0, 5, -1]),
            queue_deadline=draw.choice([None, None, now + 2 * draw.random()]),
            deadline=draw.choice([None, None, now + 3 * draw.random()]),
            prefix=prefix_of(client, prompt, shared),
        )
        params = SamplingParams(
            seed=draw.randrange(4),
            ignore_eos=draw.random() < 0.5,
            repeat_penalty=draw.choice([1.0, 1.3]),
            penalty_last_n=3,
        )
        wish = Wish(job, prompt, params, shared=shared)
        before = list(self.world.clients.sessions.values())[-4:]
        if not before or draw.random() < 0.5:
            return wish
        return following(wish, draw.choice(before), self.world.facts.context_tokens)


@pytest.mark.parametrize("turns", [False, True], ids=["reserve", "optimistic"])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("first", [0, 1000, 2000])
def test_no_walk_breaks_a_promise_or_leaves_the_node_busy(first: int, depth: int, turns: bool) -> None:
    parks = drops = answers = 0
    for seed in range(first, first + _WALKS):
        walk = Walk(seed, depth, turns=turns)
        try:
            walk.run()
        except Exception as error:
            error.add_note(f"Walk({seed}, depth={depth}, turns={turns})")
            raise
        seen = walk.world.scheduler.telemetry(walk.world.now)
        answers += walk.world.copied_answers
        parks, drops = parks + seen.parks_total, drops + seen.park_drops_total
    assert (parks > drops > 0 and answers > 0) if turns else parks == 0
