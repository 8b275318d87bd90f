"""How an open engine serves: whom it believes, and that it never waits when it is over. The link is a script."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from hand_worker import facts

from treadle_shared.config import NodeConfig, make_config
from treadle_shared.engine import BatchEngine, DecodeItem, PrefillItem, StepResult
from treadle_shared.errors import DecodeFailed
from treadle_shared.limits import MAX_ANSWERS, PROTOCOL_MAJOR, PROTOCOL_MINOR
from treadle_shared.sampling import SamplingParams
from treadle_shared.ticks import (
    DecodeRow,
    PrefillRow,
    Tick,
    TickResult,
    ToWorker,
    WorkerHello,
    WorkerRefused,
    WorkerWelcome,
)
from treadle_shared.tokens import pack_tokens
from treadle_worker.engines import OpenEngine
from treadle_worker.serving import MAX_OUTSTANDING, Serving
from treadle_worker.status import WorkerStatus

ME, BROKER = "me", "broker"


class IdleEngine:
    """Holds nothing and runs nothing."""

    recipe_fingerprint = "one"
    kv_tokens = 0

    def __init__(self) -> None:
        self.facts = facts()

    def prefill(self, items: list[PrefillItem]) -> list[StepResult]:
        raise AssertionError(items)

    def decode_batch(self, items: list[DecodeItem]) -> list[StepResult]:
        raise AssertionError(items)

    def release(self, session: int | str, epoch: int) -> None:
        raise AssertionError((session, epoch))


class StreamingEngine(IdleEngine):
    """Every row yields a token; at ``ends`` an end of generation, at ``fails`` nothing more, at ``breaks`` the engine
    raises what no engine should. A batch takes ``seconds``.
    """

    def __init__(self, ends: int = -1, fails: int = -1, breaks: int = -1, seconds: float = 0.0) -> None:
        super().__init__()
        self._ends, self._fails, self._breaks, self._seconds = ends, fails, breaks, seconds

    def prefill(self, items: list[PrefillItem]) -> list[StepResult]:
        return [StepResult(item.session, item.epoch, 7) for item in items]

    def decode_batch(self, items: list[DecodeItem]) -> list[StepResult]:
        time.sleep(self._seconds)
        if items[0].pos == self._breaks:
            raise RuntimeError("a bug")
        if items[0].pos == self._fails:
            raise DecodeFailed("injected", 2)
        return [StepResult(item.session, item.epoch, 7, eog=item.pos == self._ends) for item in items]

    def release(self, session: int | str, epoch: int) -> None:
        pass


class ScriptedLink:
    """Each turn hears what ``turns`` has for it. ``early`` waited before there was anything to offer."""

    def __init__(self, status: WorkerStatus, *turns: list[ToWorker], early: tuple[ToWorker, ...] = ()) -> None:
        self.said: list[msgspec.Struct] = []
        self.together: list[int] = []
        self.waits = 0
        self.reopened = 0
        self.deaf = False
        self.on_turn: Callable[[int], None] = lambda _turn: None
        self._status = status
        self._turns = [*turns]
        self._early = [*early]
        self._turn = 0

    def drop_waiting(self) -> None:
        self._early.clear()

    def receive(self) -> Iterator[ToWorker]:
        yield from self._early
        self._early.clear()
        if self._turn >= len(self._turns):
            self._status.draining = True
            return
        yield from self._turns[self._turn]
        self._turn += 1
        self.on_turn(self._turn)

    def send(self, *messages: msgspec.Struct) -> bool:
        self.said.extend(messages)
        self.together.append(len(messages))
        return not self.deaf

    def wait(self, seconds: float | None) -> None:
        assert not self._status.draining, "waits although it is over"
        self.waits += 1

    def reopen(self) -> None:
        self.reopened += 1

    def of(self, kind: type[Any]) -> list[Any]:
        return [message for message in self.said if isinstance(message, kind)]


def serve(*turns: list[ToWorker], early: tuple[ToWorker, ...] = ()) -> tuple[int, ScriptedLink]:
    status = WorkerStatus()
    link = ScriptedLink(status, *turns, early=early)
    return serving(status, link).run(), link


def serving(
    status: WorkerStatus, link: Any, engine: BatchEngine | None = None, config: NodeConfig | None = None
) -> Serving:
    engine = engine or IdleEngine()
    config = config or make_config({"engine": "reference"})
    return Serving(config, ME, OpenEngine(engine, lambda: None, "reference", "cpu", ""), status, link)


def welcome(broker: str = BROKER) -> WorkerWelcome:
    return WorkerWelcome(major=PROTOCOL_MAJOR, minor=PROTOCOL_MINOR, broker_id=broker, worker_id=ME)


def tick(number: int, broker: str = BROKER) -> Tick:
    return Tick(broker_id=broker, worker_id=ME, tick_id=number)


def test_an_offer_is_made_at_once_and_ticks_run_after_the_welcome() -> None:
    code, link = serve([tick(1)], [welcome(), tick(2)], [tick(3)])
    assert code == 0
    assert isinstance(link.said[0], WorkerHello)
    assert [result.tick_id for result in link.of(TickResult)] == [2, 3]


def test_what_was_said_before_the_offer_is_not_believed() -> None:
    busy, unwanted = WorkerRefused(reason="busy"), WorkerRefused(reason="version")
    code, link = serve([], [], early=(busy, busy, unwanted, welcome(), tick(1)))
    assert code == 0
    assert len(link.of(WorkerHello)) == 1
    assert not link.of(TickResult)


def test_a_final_refusal_ends_it_without_a_wait() -> None:
    code, link = serve([WorkerRefused(reason="version")], [])
    assert (code, link.waits) == (1, 0)


def test_being_told_to_stop_while_it_listens_is_not_slept_over() -> None:
    status = WorkerStatus()
    link = ScriptedLink(status, [welcome()], [])
    link.on_turn = lambda turn: setattr(status, "draining", turn == 2)
    assert serving(status, link).run() == 0  # the link refuses to wait then


def test_being_told_to_stop_leaves_the_ticks_that_wait() -> None:
    status = WorkerStatus()
    link = ScriptedLink(status, [welcome()], [tick(1), tick(2)])
    link.on_turn = lambda turn: setattr(status, "draining", turn == 2)
    serving(status, link).run()
    assert not link.of(TickResult)


def test_more_ticks_than_a_broker_may_have_out_are_dropped_and_counted() -> None:
    status = WorkerStatus()
    ticks: list[ToWorker] = [tick(number) for number in range(MAX_OUTSTANDING + 2)]
    link = ScriptedLink(status, [welcome(), *ticks], *([] for _ in range(MAX_OUTSTANDING)))
    serving(status, link).run()
    assert [result.tick_id for result in link.of(TickResult)] == [*range(MAX_OUTSTANDING)]
    assert status.ignored.total == 2


@pytest.mark.parametrize("lost", [[WorkerRefused(reason="unknown")], [welcome("another")]])
def test_ticks_of_a_broker_that_is_gone_do_not_run(lost: list[ToWorker]) -> None:
    _, link = serve([welcome(), tick(1), tick(2), *lost], [tick(3)])
    assert not link.of(TickResult)


def test_a_broker_that_takes_no_result_is_left_for_a_new_connection() -> None:
    status = WorkerStatus()
    link = ScriptedLink(status, [], [welcome(), tick(1)], [tick(2)], [])
    link.on_turn = lambda turn: setattr(link, "deaf", turn == 2)
    serving(status, link).run()
    assert link.reopened == 1
    assert [result.tick_id for result in link.of(TickResult)] == [1]
    assert len(link.of(WorkerHello)) == 2


def test_without_a_supervisor_it_stays_for_the_broker_that_it_serves() -> None:
    status = WorkerStatus()
    link = ScriptedLink(status, [welcome()], [tick(1)], [tick(2)], [])
    link.on_turn = lambda turn: setattr(status, "orphaned", turn >= 2)
    assert serving(status, link).run() == 0
    assert [result.tick_id for result in link.of(TickResult)] == [1, 2]


@pytest.mark.parametrize(
    "turns", [[[]], [[welcome()], [WorkerRefused(reason="unknown")]], [[WorkerRefused(reason="busy")]]]
)
def test_without_a_supervisor_it_waits_for_no_broker(turns: list[list[ToWorker]]) -> None:
    status = WorkerStatus()
    link = ScriptedLink(status, *turns, [welcome("another"), tick(1, "another")], [])
    link.on_turn = lambda turn: setattr(status, "orphaned", turn == len(turns))
    assert serving(status, link).run() == 0
    assert not link.of(TickResult)
    assert not link.of(WorkerHello), "it offers itself to nobody any more"
    assert not status.draining, "it left by itself"


def test_silence_from_before_the_welcome_does_not_end_it() -> None:
    status = WorkerStatus()
    link = ScriptedLink(status, [], [welcome(), tick(1)], [])
    link.on_turn = lambda turn: setattr(status, "unheard", turn == 1)
    serving(status, link).run()
    assert link.reopened == 0
    assert [result.tick_id for result in link.of(TickResult)] == [1]


# ---- answers that may wait


def prefilling(number: int, slot: int = 0, **more: Any) -> Tick:
    row = PrefillRow(slot, 1, 0, pack_tokens([1, 2]), True, 0, SamplingParams(seed=1))
    return msgspec.structs.replace(tick(number), prefill=[row], **more)


def decode(number: int, hold: bool = False) -> Tick:
    """The tick of that number, at the position it has where tick 1 prefilled two tokens."""
    return msgspec.structs.replace(tick(number), decode=[DecodeRow(0, 1, number)], hold=hold)


def answers(*turns: list[ToWorker], engine: BatchEngine | None = None) -> list[list[int]]:
    """The ticks whose answers left between the hearing of each turn and of the next; one before them opens slot 0."""
    status = WorkerStatus()
    link = ScriptedLink(status, [welcome(), prefilling(1)], *turns)
    seen: list[int] = []
    link.on_turn = lambda _turn: seen.append(len(link.of(TickResult)))
    assert serving(status, link, engine or StreamingEngine()).run() == 0
    order = [result.tick_id for result in link.of(TickResult)]
    counts = [*seen[2:], len(order)]
    return [order[before:after] for before, after in zip([1, *counts], counts, strict=False)]


def test_an_answer_that_may_wait_leaves_with_the_next_in_order() -> None:
    assert answers([decode(2, hold=True), decode(3, hold=True), decode(4)], [], []) == [[], [], [2, 3, 4]]


def test_answers_that_leave_together_are_one_message() -> None:
    status = WorkerStatus()
    ticks: list[ToWorker] = [decode(2, hold=True), decode(3, hold=True), decode(4)]
    link = ScriptedLink(status, [welcome(), prefilling(1)], ticks, [], [])
    serving(status, link, StreamingEngine()).run()
    assert link.together == [1, 3], "the answer of the prompt, three answers of a stream"


def test_it_leaves_before_a_wait_where_no_tick_is_there() -> None:
    status = WorkerStatus()
    link = ScriptedLink(status, [welcome(), prefilling(1)], [decode(2, hold=True)], [])
    answered: list[list[int]] = []
    link.wait = lambda _seconds: answered.append([part.tick_id for part in link.of(TickResult)])  # type: ignore[method-assign]
    serving(status, link, StreamingEngine()).run()
    assert answered == [[1, 2]]


def test_it_does_not_wait_for_a_prompt() -> None:
    assert answers([decode(2, hold=True), prefilling(3, slot=1)], []) == [[], [2, 3]]
    parts: list[int] = []

    class Watching(StreamingEngine):
        def prefill(self, items: list[PrefillItem]) -> list[StepResult]:
            parts.append(len(link.of(TickResult)))
            return super().prefill(items)

    status = WorkerStatus()
    link = ScriptedLink(status, [welcome(), prefilling(1)], [decode(2, hold=True), prefilling(3, slot=1)], [], [])
    serving(status, link, Watching()).run()
    assert parts == [0, 2]


def test_the_end_of_a_sequence_does_not_wait() -> None:
    ticks: list[ToWorker] = [decode(2, hold=True), decode(3, hold=True), decode(4, hold=True), decode(5)]
    assert answers(ticks, [], [], [], engine=StreamingEngine(ends=3)) == [[], [2, 3], [4], [5]]


def test_a_failure_does_not_wait_and_comes_after_what_waited() -> None:
    ticks: list[ToWorker] = [decode(2, hold=True), decode(3, hold=True), decode(4)]
    assert answers(ticks, [], [], engine=StreamingEngine(fails=3)) == [[], [2, 3], [4]]


def test_being_told_to_stop_lets_waiting_answers_leave() -> None:
    assert answers([decode(2, hold=True), decode(3)]) == [[2]]


def test_what_waits_for_a_broker_that_is_gone_is_dropped() -> None:
    ticks: list[ToWorker] = [decode(2, hold=True), decode(3)]
    assert answers(ticks, [welcome("another")], []) == [[], [], []]


def test_no_answer_waits_longer_than_it_may_where_the_engine_has_become_slow() -> None:
    ticks: list[ToWorker] = [decode(number, hold=True) for number in range(2, 6)]
    assert answers([*ticks, decode(6)], [], [], [], [], engine=StreamingEngine(seconds=0.06)) == [
        [], [], [2, 3], [], [4, 5, 6],
    ]  # fmt: skip


def test_no_message_has_more_answers_than_a_broker_takes() -> None:
    status = WorkerStatus()
    numbers = range(2, 3 * MAX_ANSWERS)
    groups: list[list[ToWorker]] = [[decode(first, hold=True), decode(first + 1, hold=True)] for first in numbers[::2]]
    link = ScriptedLink(status, [welcome(), prefilling(1)], *groups)
    config: NodeConfig = make_config({"engine": "reference", "coalesce_ms": 250})
    serving(status, link, StreamingEngine(), config).run()
    assert MAX_ANSWERS / 2 < max(link.together) <= MAX_ANSWERS
    assert sum(link.together) == len(link.said)


def test_an_answer_does_not_wait_for_moves() -> None:
    moving = msgspec.structs.replace(decode(3), release=[5])
    assert answers([decode(2, hold=True), moving], []) == [[], [2, 3]]
    seen: list[int] = []

    class Watching(StreamingEngine):
        def release(self, session: int | str, epoch: int) -> None:
            seen.append(len(link.of(TickResult)))

    status = WorkerStatus()
    both: list[ToWorker] = [welcome(), prefilling(1), prefilling(2, slot=5)]
    held = msgspec.structs.replace(decode(2, hold=True), tick_id=3)
    freed = msgspec.structs.replace(decode(3), tick_id=4, release=[5])
    link = ScriptedLink(status, both, [], [held, freed], [], [])
    serving(status, link, Watching()).run()
    assert seen[0] == 3


def test_an_engine_that_breaks_takes_no_finished_answer_with_it() -> None:
    status = WorkerStatus()
    link = ScriptedLink(
        status, [welcome(), prefilling(1)], [decode(2, hold=True), decode(3, hold=True), decode(4)], [], []
    )
    with pytest.raises(RuntimeError, match="a bug"):
        serving(status, link, StreamingEngine(breaks=4)).run()
    assert [part.tick_id for part in link.of(TickResult)] == [1, 2, 3]
