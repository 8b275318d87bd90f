"""The scheduler under every order of events that hypothesis can think of, with one tick in flight and with two."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
from clientele import BLOCK, Wish, following, prefix_of, resuming
from hash_engine import N_VOCAB
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduler_world import World

from treadle_broker.session import Job, SessionKey
from treadle_shared.budget import NodeBudget
from treadle_shared.engine import EngineFacts
from treadle_shared.sampling import SamplingParams

_KV_BYTES_PER_TOKEN = 3

budgets = st.builds(
    NodeBudget,
    weight_bytes=st.just(1),
    kv_bytes=st.integers(8, 48).map(lambda tokens: tokens * _KV_BYTES_PER_TOKEN + 1),
    scratch_bytes=st.integers(4, 40),
    scratch_bytes_per_session=st.sampled_from([0, 4, 9]).map(lambda size: size % 5),
    queue_depth=st.integers(0, 5),
    queue_tokens=st.sampled_from([12, 1000]),
    max_active=st.integers(1, 5),
    max_batch_size=st.integers(1, 5),
    max_prefill_tokens_per_tick=st.integers(1, 9),
    burst_prefill_tokens_per_tick=st.sampled_from([0, 12]),
    target_ttft_ms=st.sampled_from([0, 0, 100, 2000]),
    coalesce_ms=st.sampled_from([0, 50, 1000]),
    cache_slots=st.integers(0, 3),
    prefix_block_tokens=st.just(BLOCK),
)
turns = st.fixed_dictionaries(
    {
        "max_active": st.integers(1, 7),
        "slots": st.integers(0, 3),
        "slice_tokens": st.integers(1, 4),
        "park_bytes": st.sampled_from([0, 60, 1000]),
    }
)
turning_budgets = st.builds(lambda one, turns: replace(one, kv_policy="optimistic", **turns), budgets, turns)
engines = st.builds(
    EngineFacts,
    recipe_fingerprint=st.sampled_from(["one", "one", "two"]),
    n_vocab=st.just(N_VOCAB),
    context_tokens=st.integers(12, 40),
    max_sequences=st.integers(3, 8),
    kv_bytes_per_token=st.just(_KV_BYTES_PER_TOKEN),
    weight_bytes=st.just(1),
    min_prefill_rows=st.integers(1, 2),
    replay_decode=st.booleans(),
    decode_tick_s=st.sampled_from([0.0, 0.02]),
    prefill_tokens_per_s=st.just(100.0),
    parked_bytes_each=st.sampled_from([0, 5]),
    parked_bytes_per_token=st.sampled_from([0, 4, 4]),
    park_tokens_per_s=st.sampled_from([0.0, 10.0, 90.0, 1000.0]),
    can_copy=st.sampled_from([True, True, False]),
)
seconds = st.none() | st.floats(0.01, 3.0)
wishes = st.fixed_dictionaries(
    {
        "client": st.sampled_from(["ann", "bob", "cyd"]),
        "session_id": st.sampled_from(["s0", "s1", "s2", "s3", "s4", "s5"]),
        "prompt": st.lists(st.integers(0, N_VOCAB - 1), min_size=1, max_size=14),
        "max_new_tokens": st.integers(1, 10),
        "priority": st.sampled_from([0, 0, 0, 5, -1]),
        "queue_timeout": seconds,
        "timeout": st.none() | st.none() | st.floats(0.01, 3.0),
        "alike": st.integers(0, 12),
        "seed": st.integers(0, 3),
        "penalty": st.sampled_from([1.0, 1.0, 1.3]),
        "ignore_eos": st.booleans(),
        "follows": st.none() | st.integers(0, 1 << 16),
    }
)
choices = st.integers(0, 1 << 16)


def step(**strategies: Any) -> Callable[[Callable[..., None]], Any]:
    """A rule that marks the machine unsound until it has passed, so that a failure is not hidden by teardown's."""

    def wrap(body: Callable[..., None]) -> Any:
        @rule(**strategies)
        @functools.wraps(body)
        def run(self: SchedulerMachine, **values: Any) -> None:
            self.sound = False
            body(self, **values)
            self.sound = True

        return run

    return wrap


class SchedulerMachine(RuleBasedStateMachine):
    """Rules move one message, one client or one fault; the world judges each step."""

    depth = 1

    @initialize(budget=budgets | turning_budgets, facts=engines, recover_misses=st.booleans(), down=st.booleans())
    def begin(self, budget: NodeBudget, facts: EngineFacts, recover_misses: bool, down: bool) -> None:
        self.world = World(budget, facts, self.depth, recover_misses=recover_misses)
        self.sound = True
        if not down:
            self.world.start_worker()

    # ---- clients

    @step(wish=wishes)
    def submit_one(self, wish: dict) -> None:
        self._submit([wish])

    @step(wish=wishes, share=st.sampled_from([0.0, 0.3, 0.7, 1.0]))
    def resume(self, wish: dict, share: float) -> None:
        self.world.submit([resuming(self._wish(wish), share, self.world.facts)])

    @step(group=st.lists(wishes, min_size=2, max_size=4))
    def submit_group(self, group: list[dict]) -> None:
        self._submit(group)

    def _submit(self, group: list[dict]) -> None:
        self.world.submit([self._wish(wish) for wish in group])

    @precondition(lambda self: self.world.clients.sessions)
    @step(choice=choices)
    def cancel(self, choice: int) -> None:
        self.world.cancel(self._key(choice))

    @step(choice=choices)
    def cancel_nobody(self, choice: int) -> None:
        self.world.cancel(SessionKey("ann", "s0", 1000 + choice))

    @precondition(lambda self: any(client.tokens for client in self.world.clients.sessions.values()))
    @step(choice=choices, cut=st.integers(0, 3))
    def stop(self, choice: int, cut: int) -> None:
        self.world.stop(self._key(choice), cut)

    @step(passed=st.sampled_from([0.0, 0.01, 0.3, 1.0]))
    def pass_time(self, passed: float) -> None:
        self.world.advance(passed)

    @precondition(lambda self: len(self.world.clients.sessions) > 6 and not self.world.clients.draining)
    @step(really=st.integers(0, 9))
    def drain(self, really: int) -> None:
        if really == 0:
            self.world.drain()

    # ---- ticks

    @precondition(lambda self: self.world.worker_up)
    @step()
    def plan(self) -> None:
        self.world.plan()

    @precondition(lambda self: self.world.worker_up)
    @step()
    def work(self) -> None:
        self.world.work()

    @step()
    def deliver(self) -> None:
        self.world.deliver()

    @precondition(lambda self: self.world.worker_up)
    @step(turns=st.integers(1, 6))
    def run_on(self, turns: int) -> None:
        for _ in range(turns):
            self.world.turn()
            self.world.check()

    # ---- faults

    @precondition(lambda self: self.world.worker_up)
    @step(code=st.sampled_from([1, -1, 2, -3]), prefill=st.booleans())
    def fail_a_batch(self, code: int, prefill: bool) -> None:
        self.world.fail_next_batch(code, prefill)

    @precondition(lambda self: self.world.worker_up)
    @step(restore=st.booleans())
    def fail_a_move(self, restore: bool) -> None:
        self.world.fail_next_move(restore)

    @precondition(lambda self: self.world.worker_up)
    @step(choice=choices)
    def evict(self, choice: int) -> None:
        self.world.evict(choice)

    @precondition(lambda self: self.world.worker_up)
    @step()
    def tamper_with_a_tick(self) -> None:
        self.world.tamper()

    @precondition(lambda self: self.world.worker_up)
    @step(choice=choices)
    def forget_a_row(self, choice: int) -> None:
        self.world.forget_row(choice)

    @precondition(lambda self: self.world.worker_up)
    @step(late_results=st.booleans())
    def lose_worker(self, late_results: bool) -> None:
        self.world.lose_worker(late_results)

    @precondition(lambda self: not self.world.worker_up)
    @step()
    def start_worker(self) -> None:
        self.world.start_worker()

    @precondition(lambda self: self.world.worker_known and not self.world.worker_up)
    @step(facts=engines)
    def start_another_engine(self, facts: EngineFacts) -> None:
        if facts.recipe_fingerprint == self.world.facts.recipe_fingerprint:
            facts = _same_recipe(facts, self.world.facts)
        self.world.start_worker(facts)

    @precondition(lambda self: not self.world.worker_up)
    @step(budget=budgets | turning_budgets)
    def start_with_another_budget(self, budget: NodeBudget) -> None:
        self.world.start_worker(budget=budget)

    @precondition(lambda self: self.world.late)
    @step(choice=choices)
    def late_result(self, choice: int) -> None:
        self.world.deliver_late(choice)

    # ---- always

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "world"):
            self.sound = False
            self.world.check()
            self.sound = True

    def teardown(self) -> None:
        if hasattr(self, "world") and self.sound:
            self.world.finish()

    def _wish(self, fields: dict) -> Wish:
        wish, follows = _wish(fields, self.world.now), fields["follows"]
        if follows is None or not self.world.clients.sessions:
            return wish
        before = self.world.clients.sessions[self._key(follows)]
        return following(wish, before, self.world.facts.context_tokens)

    def _key(self, choice: int) -> SessionKey:
        keys = list(self.world.clients.sessions)
        return keys[choice % len(keys)]


class TwoInFlight(SchedulerMachine):
    """The same with a second tick sent before the first is answered."""

    depth = 2


def _wish(wish: dict, now: float) -> Wish:
    prompt = [*range(min(wish["alike"], len(wish["prompt"]) - 1)), *wish["prompt"]][: len(wish["prompt"])]
    job = Job(
        client=wish["client"],
        session_id=wish["session_id"],
        prompt_tokens=len(wish["prompt"]),
        max_new_tokens=wish["max_new_tokens"],
        priority=wish["priority"],
        queue_deadline=None if wish["queue_timeout"] is None else now + wish["queue_timeout"],
        deadline=None if wish["timeout"] is None else now + wish["timeout"],
        prefix=prefix_of(wish["client"], prompt),
    )
    params = SamplingParams(
        seed=wish["seed"], ignore_eos=wish["ignore_eos"], repeat_penalty=wish["penalty"], penalty_last_n=3
    )
    return Wish(job, prompt, params)


def _same_recipe(facts: EngineFacts, known: EngineFacts) -> EngineFacts:
    """What a recipe fixes stays; how much the engine holds may change."""
    return msgspec.structs.replace(facts, min_prefill_rows=known.min_prefill_rows, replay_decode=known.replay_decode)


_SETTINGS = settings(
    deadline=None,
    max_examples=100,
    stateful_step_count=60,
    print_blob=True,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)

TestLockstep = SchedulerMachine.TestCase
TestLockstep.settings = _SETTINGS
TestTwoInFlight = TwoInFlight.TestCase
TestTwoInFlight.settings = _SETTINGS
