"""The asynchronous client."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Self, Unpack

from treadle._async_link import AsyncLink
from treadle._call import Call
from treadle._core import Core
from treadle._options import CALL_TIMEOUT_S, CONNECT_TIMEOUT_S, RESUME_TIMEOUT_S, CallOptions, Message, Prompt
from treadle._request import build_request, build_requests, check_text
from treadle._stream import Stream
from treadle.async_session import AsyncSession
from treadle_shared.calls import Request
from treadle_shared.rundir import find_runtime_dir
from treadle_shared.tokens import unpack_tokens


class AsyncClient:
    """The asynchronous twin of Client: the same names, awaited; any number of tasks of one loop may share it.

    It connects on entering ``async with``, or with the first call; ``timeout`` bounds the wait for the broker,
    ``call_timeout`` every later answer.

    ``resume=True`` keeps sessions through a lost broker: each is offered to the next one, with the tokens that came,
    and goes on; a Recovering event marks the gap. They fail with Unavailable after ``resume_timeout`` seconds.
    """

    def __init__(
        self,
        runtime_dir: str | os.PathLike[str] | None = None,
        *,
        timeout: float = CONNECT_TIMEOUT_S,
        call_timeout: float = CALL_TIMEOUT_S,
        resume: bool = False,
        resume_timeout: float = RESUME_TIMEOUT_S,
    ) -> None:
        directory = find_runtime_dir(runtime_dir)
        self._timeout = timeout
        self._call_timeout = call_timeout
        self._link = AsyncLink(directory.clients, str(directory.path), resume_timeout if resume else None)
        self._opened = False

    async def __aenter__(self) -> Self:
        try:
            await self._open()
        except BaseException:
            await self._link.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel what runs and disconnect. Idempotent; in a forked child it does nothing."""
        await self._link.close()

    # ---- generations

    async def generate(self, prompt: Prompt, **options: Unpack[CallOptions]) -> AsyncSession:
        """Continue ``prompt``, a text or token ids, and return once the node has accepted it.

        Raises InvalidRequest naming the field, a Refused where the node does not take it on, CallTimeout after
        ``timeout`` seconds, Unavailable. ``idle_timeout`` bounds the seconds between two events of the session.
        """
        return await self._start({"prompt": prompt, **options})

    async def chat(self, messages: Iterable[Message], **options: Unpack[CallOptions]) -> AsyncSession:
        """Answer a chat, a list of ``{"role": …, "content": …}``, through the model's own template.

        Options and errors are those of ``generate``.
        """
        return await self._start({"messages": messages, **options})

    async def submit_many(
        self,
        requests: Iterable[Mapping[str, Any] | Request],
        *,
        timeout: float | None = None,
        idle_timeout: float | None = None,
    ) -> list[AsyncSession]:
        """Submit up to 256 requests together: all are accepted, or none.

        Each is a mapping of ``generate``'s or ``chat``'s arguments, or a Request. Raises the error of the first
        refusal, with every decision in its ``decisions``; fields of InvalidRequest are led by ``requests[i]``.
        """
        self._link.guard()
        return await self._submit(build_requests(requests), timeout, idle_timeout)

    # ---- questions

    async def tokenize(self, text: str, *, timeout: float | None = None) -> list[int]:
        """The token ids of a text as a prompt would be tokenised."""
        checked = check_text("text", text)
        call = await self._ask(lambda core: core.tokenize(checked), timeout)
        return unpack_tokens(call.reply.tokens).tolist()

    async def model_info(self, *, timeout: float | None = None) -> dict[str, Any]:
        """The loaded model: name, vocabulary, context, recipe."""
        return await self._fact("model", timeout)

    async def status(self, *, timeout: float | None = None) -> dict[str, Any]:
        """How the node stands: ``ready``, ``reason``, ``exact``, ``recipe``, ``model``, ``pids``, ``telemetry``, …"""
        return await self._fact("status", timeout)

    async def telemetry(self, *, timeout: float | None = None) -> dict[str, Any]:
        """One consistent snapshot of the scheduler; the keys are those of SchedulerTelemetry."""
        return await self._fact("telemetry", timeout)

    # ----

    async def _open(self) -> None:
        if not self._opened:
            await self._link.open(self._timeout)
            self._opened = True

    async def _start(self, fields: dict[str, Any]) -> AsyncSession:
        self._link.guard()
        timeout, idle_timeout = fields.pop("timeout", None), fields.pop("idle_timeout", None)
        return (await self._submit([build_request(fields)], timeout, idle_timeout))[0]

    async def _submit(
        self, requests: list[Request], timeout: float | None, idle_timeout: float | None
    ) -> list[AsyncSession]:
        call = await self._ask(lambda core: core.submit(requests), timeout)
        return [AsyncSession(self, self._link, stream, idle_timeout) for stream in call.streams]

    async def _cancel(self, stream: Stream, timeout: float | None) -> bool:
        found: bool = (await self._ask(lambda core: core.cancel(stream), timeout)).reply.found
        return found

    async def _fact(self, what: str, timeout: float | None) -> dict[str, Any]:
        facts: dict[str, Any] = (await self._ask(lambda core: core.ask(what), timeout)).reply.facts
        return facts

    async def _ask(self, question: Callable[[Core], Call], timeout: float | None) -> Call:
        await self._open()
        return await self._link.call(question, self._call_timeout if timeout is None else timeout)
