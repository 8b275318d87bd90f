"""A broker that dies: clients that resume get every text whole."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from real_node import RealNode, wait_for

from treadle import AsyncClient, Recovering, SessionFailed, Unavailable
from treadle_shared.config import config_to_toml

OPTIONS: dict[str, Any] = {"max_tokens": 600, "ignore_eos": True, "temperature": 0.8, "seed": 5}


@pytest.fixture
def node(make_node: Any) -> RealNode:
    return make_node(engine="reference", session_tokens=1024, max_sessions=4).start().wait_ready()


def _restart_broker(node: RealNode) -> None:
    node.kill("broker")
    node.processes["broker"].wait()
    node.start("broker")


def test_eight_sessions_survive_a_killed_broker_whole(node: RealNode) -> None:
    worker = node.processes["worker"].pid
    with node.client() as client:
        quiet = [client.generate(f"text {number}", **OPTIONS).result() for number in range(8)]
    with node.client(resume=True) as client:
        sessions = [client.generate(f"text {number}", **OPTIONS) for number in range(8)]
        for kill in range(2):  # four run and four wait, or have run
            wait_for(lambda at=40 * (kill + 1): len(sessions[0].tokens) > at, "tokens flow")
            _restart_broker(node)
        assert [session.result() for session in sessions] == quiet
        for session in sessions:
            assert len(session.tokens) == 600
            assert session.finish_reason == "length"
        assert any(isinstance(event, Recovering) for event in sessions[0].events())
        assert client.status()["pids"]["worker"] == worker
    assert node.wait_idle()["failed_total"] == 0


def test_stop_strings_and_logprobs_go_on_after_a_resumption(node: RealNode) -> None:
    options = {**OPTIONS, "logprobs": 1}
    with node.client(resume=True) as client:
        quiet = client.generate("abc", **options)
        text = quiet.result()
        stop = text[-12:-6]
        cut = text.index(stop)
        session = client.generate("abc", **options, stop=[stop])
        wait_for(lambda: len(session.tokens) > 50, "tokens flow")
        _restart_broker(node)
        assert session.result() == text[:cut]
        assert session.finish_reason == "stop"
        assert [entry.token for entry in session.logprobs] == session.tokens
        assert session.logprobs == quiet.logprobs[: len(session.logprobs)]


def test_without_resume_the_sessions_are_lost(node: RealNode) -> None:
    with node.client() as client:
        session = client.generate("abc", **OPTIONS)
        wait_for(lambda: len(session.tokens) > 10, "tokens flow")
        _restart_broker(node)
        with pytest.raises(Unavailable):
            session.result()


def test_a_session_that_no_broker_takes_back_fails_in_time(node: RealNode) -> None:
    with node.client(resume=True, resume_timeout=0.5) as client:
        session = client.generate("abc", **OPTIONS)
        wait_for(lambda: len(session.tokens) > 10, "tokens flow")
        node.kill("broker")
        with pytest.raises(Unavailable):
            session.result(timeout=10)


@pytest.mark.parametrize("order", [("broker", "worker"), ("worker", "broker")])
def test_a_node_that_came_back_with_another_recipe_ends_the_session_instead_of_mixing(
    node: RealNode, order: tuple[str, str]
) -> None:
    with node.client(resume=True) as client:
        session = client.generate("abc", **OPTIONS)
        young = client.generate("no token yet", **{**OPTIONS, "max_tokens": 5}, session_id="young")
        quiet = young.result()
        wait_for(lambda: len(session.tokens) > 30, "tokens flow")
        for name in ("broker", "worker"):
            node.kill(name)
            node.processes[name].wait()
        config = msgspec.structs.replace(node.config, reference_seed=1)
        (node.path / "node.toml").write_text(config_to_toml(config))
        node.start(order[0]).start(order[1])
        with pytest.raises(SessionFailed, match="recipe_changed"):
            session.result(timeout=60)
        assert client.generate("no token yet", **{**OPTIONS, "max_tokens": 5}).result() != quiet


def test_the_asynchronous_twin_resumes_too(node: RealNode) -> None:
    async def run() -> None:
        async with AsyncClient(node.path, resume=True) as client:
            quiet = await (await client.generate("abc", **OPTIONS)).result()
            session = await client.generate("abc", **OPTIONS)
            while len(session.tokens) < 30:
                await asyncio.sleep(0.005)
            await asyncio.to_thread(_restart_broker, node)
            assert await session.result() == quiet

    asyncio.run(run())
