"""The asynchronous client over real sockets, against a broker that does what the test says."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_broker import FakeBroker

from treadle import (
    AsyncClient,
    AsyncSession,
    CallTimeout,
    ClientClosed,
    Done,
    ForkedClient,
    InvalidRequest,
    Overloaded,
    SessionFailed,
    Started,
    TextDelta,
    Unavailable,
    VersionMismatch,
)
from treadle.events import Event
from treadle_shared import AdmissionDecision, AdmissionReason, DoneReason, calls
from treadle_shared.rundir import RuntimeDir

ENDLESS = " ".join(f"w{number}" for number in range(100_000))
WAIT_S = 20.0

Body = Callable[[AsyncClient], Coroutine[Any, Any, None]]


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[FakeBroker]:
    with FakeBroker(RuntimeDir(tmp_path / "node")) as broker:
        yield broker


def run(broker: FakeBroker, body: Body) -> None:
    """Run ``body`` with a client in a loop of its own."""

    async def main() -> None:
        async with AsyncClient(broker.directory.path) as client:
            await body(client)

    asyncio.run(asyncio.wait_for(main(), 60.0))


async def until(condition: Callable[[], bool]) -> None:
    """Return once the condition holds; TimeoutError after WAIT_S."""
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.005)


async def is_cancelled(broker: FakeBroker, session: AsyncSession) -> None:
    await until(lambda: broker.live == 0)
    assert await session.wait(5.0) == "cancelled"


def test_iterating_yields_text_and_events_tell_everything(broker: FakeBroker) -> None:
    async def body(client: AsyncClient) -> None:
        session = await client.generate("a b c", max_tokens=9, seed=3)
        pieces = [text async for text in session]
        assert pieces == ["a", " b", " c"]
        assert (session.text, session.tokens, session.finish_reason, session.seed) == ("a b c", [0, 1, 2], "stop", 3)
        events = [event async for event in session.events()]
        assert [type(event) for event in events] == [Started, TextDelta, TextDelta, TextDelta, Done]
        chat = await client.chat([{"role": "user", "content": "hi there"}])
        assert await chat.result() == "hi there"

    run(broker, body)


def test_facts_come_as_dictionaries(broker: FakeBroker) -> None:
    async def body(client: AsyncClient) -> None:
        assert await client.status() == {"ready": True}
        assert await client.model_info() == {"name": "fake"}
        assert await client.telemetry() == {}
        assert await client.tokenize("a") == [256, 97]

    run(broker, body)


def test_hundreds_of_tasks_share_a_client(broker: FakeBroker) -> None:
    async def body(client: AsyncClient) -> None:
        async def ask(number: int) -> str:
            return await (await client.generate(f"code{number} x y")).result()

        texts = await asyncio.gather(*(ask(number) for number in range(300)))
        assert texts == [f"code{number} x y" for number in range(300)]

    run(broker, body)


def test_two_tasks_may_wait_for_one_session(broker: FakeBroker) -> None:
    async def body(client: AsyncClient) -> None:
        broker.go.clear()
        session = await client.generate("a b c")
        waiting = [asyncio.create_task(session.result()) for _ in range(3)]
        await asyncio.sleep(0)
        broker.go.set()
        assert await asyncio.gather(*waiting) == ["a b c"] * 3

    run(broker, body)


def test_a_group_is_submitted_together_and_refused_together(broker: FakeBroker) -> None:
    async def body(client: AsyncClient) -> None:
        sessions = await client.submit_many([{"prompt": "a"}, {"prompt": "b"}])
        assert [await session.result() for session in sessions] == ["a", "b"]
        broker.refuse = lambda request: AdmissionDecision(
            reason=AdmissionReason.REJECTED_QUEUE_FULL, session_id="", retry_after_s=1.0
        )
        with pytest.raises(Overloaded) as refused:
            await client.submit_many([{"prompt": "a"}, {"prompt": "b"}])
        assert len(refused.value.decisions) == 2

    run(broker, body)


def test_a_wrong_value_is_refused_before_anything_is_sent(broker: FakeBroker) -> None:
    async def body(client: AsyncClient) -> None:
        with pytest.raises(InvalidRequest, match="top_k"):
            await client.generate("x", top_k=-1)
        assert broker.count(calls.Submit) == 0

    run(broker, body)


def test_an_end_that_was_not_asked_for_is_raised_after_the_text(broker: FakeBroker) -> None:
    async def body(client: AsyncClient) -> None:
        broker.end_with["bad"] = (DoneReason.FAILED, "because")
        session = await client.generate("bad end")
        with pytest.raises(SessionFailed, match="because"):
            async for _ in session:
                pass

    run(broker, body)


def test_leaving_the_sessions_block_cancels(broker: FakeBroker) -> None:
    async def body(client: AsyncClient) -> None:
        async with await client.generate(ENDLESS) as session:
            async for _ in session:
                break
        await is_cancelled(broker, session)

    run(broker, body)


def test_leaving_a_bare_loop_cancels(broker: FakeBroker) -> None:
    async def body(client: AsyncClient) -> None:
        session = await client.generate(ENDLESS)
        async for _ in session:
            break
        await is_cancelled(broker, session)

    run(broker, body)


def test_cancelling_the_task_that_waits_cancels_the_session(broker: FakeBroker) -> None:
    async def body(client: AsyncClient) -> None:
        broker.go.clear()
        for wait in (AsyncSession.result, _all_of):
            session = await client.generate("x y")
            task = asyncio.create_task(wait(session))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await is_cancelled(broker, session)

    run(broker, body)


async def _all_of(session: AsyncSession) -> list[str]:
    return [text async for text in session]


def test_cancelling_the_task_that_submits_cancels_what_is_accepted_later(broker: FakeBroker) -> None:
    async def body(client: AsyncClient) -> None:
        broker.go.clear()
        task = asyncio.create_task(client.generate("x y"))
        await asyncio.sleep(0)
        assert client._link.core.next_frame() is not None  # asked, and not even sent
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: broker.count(calls.Cancel) == 1 and broker.live == 0)

    run(broker, body)


def test_explicit_cancel_tells_whether_it_ran(broker: FakeBroker) -> None:
    async def body(client: AsyncClient) -> None:
        session = await client.generate(ENDLESS)
        assert await session.cancel() is True
        await is_cancelled(broker, session)
        assert await session.cancel() is False

    run(broker, body)


def test_leaving_the_clients_block_cancels_and_hears_of_it(broker: FakeBroker) -> None:
    async def main() -> None:
        async with AsyncClient(broker.directory.path) as client:
            session = await client.generate(ENDLESS)
        assert session.finish_reason == "cancelled"
        with pytest.raises(ClientClosed):
            await client.status()
        await client.close()

    asyncio.run(main())
    assert broker.live == 0


def test_it_connects_with_the_first_call(broker: FakeBroker) -> None:
    async def main() -> None:
        client = AsyncClient(broker.directory.path)
        try:
            assert await asyncio.gather(client.status(), client.model_info()) == [{"ready": True}, {"name": "fake"}]
        finally:
            await client.close()

    asyncio.run(main())


def test_timeouts_are_typed(broker: FakeBroker) -> None:
    async def body(client: AsyncClient) -> None:
        broker.go.clear()
        broker.silent.add(calls.Ask)
        with pytest.raises(CallTimeout):
            await client.status(timeout=0.05)
        session = await client.generate("x y", idle_timeout=0.05)
        with pytest.raises(CallTimeout):
            await session.result(0.05)
        with pytest.raises(CallTimeout):
            await _all_of(session)
        await is_cancelled(broker, session)

    run(broker, body)


def test_a_broker_that_dies_fails_everything_that_waits(broker: FakeBroker) -> None:
    async def body(client: AsyncClient) -> None:
        broker.go.clear()
        broker.silent.add(calls.Ask)
        session = await client.generate("x y")
        waiting = [asyncio.create_task(one) for one in (client.status(), session.result(), _all_of(session))]
        await until(lambda: broker.count(calls.Ask) == 1)
        await asyncio.to_thread(broker.die)
        results = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 1.0)
        assert [type(result) for result in results] == [Unavailable] * 3
        with FakeBroker(broker.directory, boot_id="boot-2"):
            await until(lambda: client._link.core.boot_id == "boot-2")
            assert await (await client.generate("again")).result() == "again"

    run(broker, body)


def test_no_broker_and_another_version_are_told(tmp_path: Path) -> None:
    async def main() -> None:
        with pytest.raises(Unavailable, match="treadle serve"):
            async with AsyncClient(tmp_path / "nothing", timeout=0.1):
                pass
        with FakeBroker(RuntimeDir(tmp_path / "node"), major=9), pytest.raises(VersionMismatch):
            async with AsyncClient(tmp_path / "node"):
                pass

    asyncio.run(main())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # forking with threads is what is tested
def test_a_client_made_before_a_fork_refuses_to_be_used_after_it(broker: FakeBroker) -> None:
    async def body(client: AsyncClient) -> None:
        broker.go.clear()
        session = await client.generate("x y")
        events = session.events()
        child = os.fork()
        if child == 0:
            os._exit(_refusals(client, session, events))
        _, status = os.waitpid(child, 0)
        broker.go.set()
        assert os.waitstatus_to_exitcode(status) == 6

    run(broker, body)


def _refusals(client: AsyncClient, session: AsyncSession, events: AsyncIterator[Event]) -> int:
    """How many uses raise ForkedClient; each coroutine is driven by hand, since the loop is the parent's."""
    refused = 0
    coroutines = (client.generate("x"), client.status(), session.wait(), session.cancel(), client.tokenize("x"))
    for use in (*coroutines, events.__anext__()):
        try:
            use.send(None)  # type: ignore[attr-defined]
        except ForkedClient:
            refused += 1
    return refused
