"""The synchronous client."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Self, Unpack

from treadle._call import Call
from treadle._core import Core
from treadle._link import Link
from treadle._options import CALL_TIMEOUT_S, CONNECT_TIMEOUT_S, RESUME_TIMEOUT_S, CallOptions, Message, Prompt
from treadle._request import build_request, build_requests, check_text
from treadle._stream import Stream
from treadle.session import Session
from treadle_shared.calls import Request
from treadle_shared.rundir import find_runtime_dir
from treadle_shared.tokens import unpack_tokens


class Client:
    """A connection to the node of a runtime directory; any number of threads may share it.

    The directory is looked for in this order: the argument, ``TREADLE_RUNTIME_DIR``, the private per-user
    directory if a broker lives there, ``/run/treadle``. The constructor waits up to ``timeout`` seconds for
    the broker and raises Unavailable, naming the directory; ``call_timeout`` bounds every later answer.

    When the broker goes away, whatever waits raises Unavailable; the client reconnects by itself and can be
    used again once the broker is back. Closing, or leaving the ``with`` block, cancels the client's sessions.

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
        self._call_timeout = call_timeout
        self._link = Link(directory.clients, str(directory.path), resume_timeout if resume else None)
        weakref.finalize(self, self._link.close_soon)
        try:
            self._link.wait_open(timeout)
        except BaseException:
            self._link.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what runs and disconnect. Idempotent; in a forked child it does nothing."""
        self._link.close()

    # ---- generations

    def generate(self, prompt: Prompt, **options: Unpack[CallOptions]) -> Session:
        """Continue ``prompt``, a text or token ids, and return once the node has accepted it.

        Raises InvalidRequest naming the field, a Refused where the node does not take it on, CallTimeout after
        ``timeout`` seconds, Unavailable. ``idle_timeout`` bounds the seconds between two events of the session.
        """
        return self._start({"prompt": prompt, **options})

    def chat(self, messages: Iterable[Message], **options: Unpack[CallOptions]) -> Session:
        """Answer a chat, a list of ``{"role": …, "content": …}``, through the model's own template.

        Options and errors are those of ``generate``.
        """
        return self._start({"messages": messages, **options})

    def submit_many(
        self,
        requests: Iterable[Mapping[str, Any] | Request],
        *,
        timeout: float | None = None,
        idle_timeout: float | None = None,
    ) -> list[Session]:
        """Submit up to 256 requests together: all are accepted, or none.

        Each is a mapping of ``generate``'s or ``chat``'s arguments, or a Request. Raises the error of the first
        refusal, with every decision in its ``decisions``; fields of InvalidRequest are led by ``requests[i]``.
        """
        self._link.guard()
        return self._submit(build_requests(requests), timeout, idle_timeout)

    # ---- questions

    def tokenize(self, text: str, *, timeout: float | None = None) -> list[int]:
        """The token ids of a text as a prompt would be tokenised."""
        checked = check_text("text", text)
        return unpack_tokens(self._ask(lambda core: core.tokenize(checked), timeout).reply.tokens).tolist()

    def model_info(self, *, timeout: float | None = None) -> dict[str, Any]:
        """The loaded model: name, vocabulary, context, recipe."""
        return self._fact("model", timeout)

    def status(self, *, timeout: float | None = None) -> dict[str, Any]:
        """How the node stands: ``ready``, ``reason``, ``exact``, ``recipe``, ``model``, ``pids``, ``telemetry``, …"""
        return self._fact("status", timeout)

    def telemetry(self, *, timeout: float | None = None) -> dict[str, Any]:
        """One consistent snapshot of the scheduler; the keys are those of SchedulerTelemetry."""
        return self._fact("telemetry", timeout)

    # ----

    def _start(self, fields: dict[str, Any]) -> Session:
        self._link.guard()
        timeout, idle_timeout = fields.pop("timeout", None), fields.pop("idle_timeout", None)
        return self._submit([build_request(fields)], timeout, idle_timeout)[0]

    def _submit(self, requests: list[Request], timeout: float | None, idle_timeout: float | None) -> list[Session]:
        call = self._ask(lambda core: core.submit(requests), timeout)
        return [Session(self, self._link, stream, idle_timeout) for stream in call.streams]

    def _cancel(self, stream: Stream, timeout: float | None) -> bool:
        found: bool = self._ask(lambda core: core.cancel(stream), timeout).reply.found
        return found

    def _fact(self, what: str, timeout: float | None) -> dict[str, Any]:
        facts: dict[str, Any] = self._ask(lambda core: core.ask(what), timeout).reply.facts
        return facts

    def _ask(self, question: Callable[[Core], Call], timeout: float | None) -> Call:
        return self._link.call(question, self._call_timeout if timeout is None else timeout)
