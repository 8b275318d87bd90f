"""The scheduler in one process: batched inference from Python, without sockets."""

from __future__ import annotations

import random
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from treadle_broker.plan import Emitted, Event, Finished
from treadle_broker.prefix_hash import Chain, PrefixHasher
from treadle_broker.scheduler import Scheduler
from treadle_broker.session import Job, SessionKey
from treadle_broker.tick_builder import build_tick
from treadle_broker.turn_lock import TurnLock
from treadle_shared.admission import AdmissionDecision
from treadle_shared.budget import NodeBudget
from treadle_shared.engine import BatchEngine, TokenLogprobs
from treadle_shared.errors import InvalidRequest, TreadleError, WeightBudgetError
from treadle_shared.outcome import DoneReason
from treadle_shared.request import GenerationRequest
from treadle_shared.runner import TickRunner
from treadle_shared.sampling import SEED_LIMIT, SamplingParams
from treadle_shared.telemetry import SchedulerTelemetry
from treadle_shared.ticks import Tick

_CLIENT = "local"


class SchedulerStalled(TreadleError):  # noqa: N818
    """``run_to_completion`` cannot end: nothing runs although sessions wait, or its bound of ticks is reached."""


@dataclass(slots=True)
class SessionOutput:
    """One session's answer so far. ``reason`` is None while it runs; ``tokens`` exclude an end-of-generation one;
    ``token_times`` are when each came, on the scheduler's clock. Of an ended one, ``cached_tokens`` of the prompt were
    taken from another session.
    """

    session_id: str
    params: SamplingParams
    sequence: array[int]
    prompt_tokens: int
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)
    reason: DoneReason | None = None
    detail: str = ""
    cached_tokens: int = 0

    @property
    def tokens(self) -> list[int]:
        """The generated token ids."""
        return self.sequence[self.prompt_tokens :].tolist()


class ContinuousBatchScheduler:
    """Continuous batching over any BatchEngine, in the caller's process. Every method is thread-safe, and a thread
    that calls waits for one tick at most, also while another runs to completion.

    ``depth`` 2 plans a tick ahead as the service does; ``recover_misses`` rebuilds a session whose KV the engine
    evicted instead of ending it with CACHE_MISS. Prefixes are reused where the budget has ``cache_slots`` and the
    engine can copy. ``clock`` drives deadlines and rates. ``seed`` makes the seeds of
    sessions that name none repeatable.

    Raises WeightBudgetError where the engine's weights exceed the budget.
    """

    def __init__(
        self,
        engine: BatchEngine,
        budget: NodeBudget,
        *,
        depth: int = 1,
        recover_misses: bool = False,
        clock: Callable[[], float] = time.monotonic,
        seed: int | None = None,
    ) -> None:
        facts = engine.facts
        if facts.weight_bytes > budget.weight_bytes:
            raise WeightBudgetError(facts.weight_bytes, budget.weight_bytes)
        self._lock = TurnLock()
        self._clock = clock
        self._runner = TickRunner(engine)
        self._facts = facts
        self._scheduler = Scheduler(budget, facts, depth=depth, recover_misses=recover_misses, eager=True)
        self._scheduler.worker_ready(facts, clock())
        self._hasher = PrefixHasher("node" if budget.cache_slots else "off", budget.prefix_block_tokens)
        self._random = random.Random(seed)  # noqa: S311  (seeds of samplers, not secrets)
        self._ticks: deque[Tick] = deque()
        self._live: dict[SessionKey, SessionOutput] = {}
        self._chains: dict[SessionKey, Chain] = {}
        self._outputs: dict[str, SessionOutput] = {}

    def submit(self, request: GenerationRequest) -> AdmissionDecision:
        """Decide on one request. Raises InvalidRequest where a prompt token is outside the vocabulary."""
        return self.submit_many([request])[0]

    def submit_many(self, requests: Sequence[GenerationRequest]) -> list[AdmissionDecision]:
        """Decide on requests together: all are accepted or none; one decision each, in order."""
        for request in requests:
            self._check_tokens(request)
        with self._lock:
            now = self._clock()
            chains = [self._hasher.chain(_CLIENT, request.cache_salt) for request in requests]
            jobs = [self._job(request, chain, now) for request, chain in zip(requests, chains, strict=True)]
            decisions = self._scheduler.submit(jobs, now)
            for request, chain, decision in zip(requests, chains, decisions, strict=True):
                if decision.accepted:
                    self._open(request, chain, decision)
            self._scheduler.take_promoted()
            return decisions

    def cancel(self, session_id: str) -> bool:
        """End a session of exactly this id; False where none is live."""
        with self._lock:
            key = self._scheduler.find(_CLIENT, session_id)
            if key is None:
                return False
            self._take(self._scheduler.cancel(key, self._clock()))
            return True

    def run_tick(self) -> bool:
        """Plan, run and settle one tick; False where there was nothing to do."""
        with self._lock:
            self._take(self._scheduler.expire(self._clock()))
            self._plan_ahead()
            if not self._ticks:
                return False
            for part in self._runner.run(self._ticks.popleft()):
                self._take(self._scheduler.complete(part, self._clock()))
            return True

    def run_to_completion(self, max_ticks: int = 1_000_000) -> dict[str, SessionOutput]:
        """Run until no session is live; every session's output by id.

        Raises SchedulerStalled after ``max_ticks`` ticks, or where sessions wait and nothing can run.
        """
        for _ in range(max_ticks):
            with self._lock:  # nobody may submit between the tick that finds nothing to do and the look at what is left
                if not self.run_tick():
                    return self._whole_outputs(max_ticks)
        with self._lock:
            return self._whole_outputs(max_ticks)

    def output(self, session_id: str) -> SessionOutput:
        """The newest session of this id. Raises KeyError."""
        with self._lock:
            return self._outputs[session_id]

    def outputs(self) -> dict[str, SessionOutput]:
        """Every session's output by id."""
        with self._lock:
            return dict(self._outputs)

    def forget(self, session_id: str) -> None:
        """Drop a finished session's output; unknown and running ones are no error."""
        with self._lock:
            output = self._outputs.get(session_id)
            if output is not None and output.reason is not None:
                del self._outputs[session_id]

    def close(self) -> None:
        """End what is live and empty the engine, cached prompts too, so that another scheduler may use it."""
        with self._lock:
            for session in self._scheduler.sessions():
                self._take(self._scheduler.cancel(session.key, self._clock()))
            self._take(self._scheduler.worker_lost(self._clock(), "closed"))
            self._ticks.clear()
            self._runner.reset()

    def telemetry(self) -> SchedulerTelemetry:
        """One consistent snapshot."""
        with self._lock:
            return self._scheduler.telemetry(self._clock())

    @property
    def kv_peak_bytes(self) -> int:
        """The most KV bytes that live sessions held at the end of any tick."""
        return self._scheduler.kv_rows_peak * self._facts.kv_bytes_per_token

    @property
    def cache_misses(self) -> int:
        """Rows whose KV had been evicted."""
        return self._scheduler.cache_misses

    def check(self) -> None:
        """Raise AssertionError where an invariant of scheduler or engine is broken."""
        with self._lock:
            self._scheduler.check()
            self._runner.check()
            assert self._scheduler.telemetry(self._clock()).balanced

    def _whole_outputs(self, max_ticks: int) -> dict[str, SessionOutput]:
        if not self._scheduler.idle:
            snapshot = self.telemetry()
            raise SchedulerStalled(
                f"{snapshot.active_sessions} active and {snapshot.queue_depth} queued sessions after "
                f"{snapshot.ticks_total} ticks (bound: {max_ticks})"
            )
        return self.outputs()

    def _check_tokens(self, request: GenerationRequest) -> None:
        if min(request.prompt_tokens) < 0 or max(request.prompt_tokens) >= self._facts.n_vocab:
            raise InvalidRequest("prompt", f"token ids must be in [0, {self._facts.n_vocab})")

    def _open(self, request: GenerationRequest, chain: Chain, decision: AdmissionDecision) -> None:
        params = request.params
        if params.seed is None:
            params = msgspec.structs.replace(params, seed=self._random.randrange(SEED_LIMIT - 1))
        prompt = array("i", request.prompt_tokens)
        output = SessionOutput(request.session_id, params, prompt, len(prompt))
        key = SessionKey(_CLIENT, request.session_id, decision.epoch)
        self._live[key], self._chains[key] = output, chain
        self._outputs[request.session_id] = output

    def _plan_ahead(self) -> None:
        while (plan := self._scheduler.plan(self._clock())) is not None:
            self._ticks.append(build_tick(plan, _CLIENT, _CLIENT, self._live.__getitem__))
        self._scheduler.take_promoted()

    def _take(self, events: Sequence[Event]) -> None:
        now = self._clock()
        for event in events:
            if isinstance(event, Emitted):
                output = self._live[event.key]
                output.sequence.append(event.token)
                output.token_times.append(now)
                if event.logprobs is not None:
                    output.logprobs.append(event.logprobs)
                digests = self._chains[event.key].grow(output.sequence)
                if digests:
                    self._scheduler.extend(event.key, digests)
            elif isinstance(event, Finished):
                output = self._live.pop(event.key)
                del self._chains[event.key]
                output.reason, output.detail, output.cached_tokens = event.reason, event.detail, event.cached

    def _job(self, request: GenerationRequest, chain: Chain, now: float) -> Job:
        return Job(
            client=_CLIENT,
            session_id=request.session_id,
            prompt_tokens=len(request.prompt_tokens),
            max_new_tokens=request.max_new_tokens,
            priority=request.priority,
            queue_deadline=_after(now, request.queue_timeout_s),
            deadline=_after(now, request.deadline_s),
            prefix=chain.grow(array("i", request.prompt_tokens)),
        )


def _after(now: float, seconds: float | None) -> float | None:
    return None if seconds is None else now + seconds
