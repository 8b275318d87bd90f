"""Sends requests to an HTTP server and notes when tokens come, with little cost of its own: plain sockets, one event
loop, one connection a request.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, Final

from comparison.http_response import HttpResponse, MalformedResponseError
from comparison.job import Job
from comparison.trace import Outcome, Trace

HOST: Final = "127.0.0.1"
_OVERLOADED: Final = frozenset({429, 503})
_LAST: Final = b"[DONE]"

TokensOf = Callable[[dict[str, Any]], list[int]]
"""The token ids that one event brings; -1 for one whose id the server does not tell."""


class HttpDriver:
    """Asks one server. ``body`` makes a request's JSON, ``tokens_of`` reads an event."""

    def __init__(self, port: int, path: str, body: Callable[[Job], dict[str, Any]], tokens_of: TokensOf) -> None:
        self._port = port
        self._path = path
        self._body = body
        self._tokens_of = tokens_of

    async def ask(self, job: Job, trace: Trace) -> None:
        """One request on a connection of its own, to its end."""
        loop = asyncio.get_running_loop()
        over = loop.create_future()
        try:
            transport, _ = await loop.create_connection(lambda: _Exchange(self._request(job), self, trace, over), HOST,
                                                        self._port)  # fmt: skip
        except OSError as error:
            trace.end(Outcome.REFUSED, str(error))
            return
        try:
            await over
        finally:
            transport.close()

    def tokens_of(self, event: bytes) -> list[int]:
        """What an event's data brings."""
        return [] if event == _LAST else self._tokens_of(json.loads(event))

    def _request(self, job: Job) -> bytes:
        body = json.dumps(self._body(job), separators=(",", ":")).encode()
        head = (
            f"POST {self._path} HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        return head.encode() + body


class _Exchange(asyncio.Protocol):
    """One request and its answer; ``over`` is set at the end."""

    def __init__(self, request: bytes, driver: HttpDriver, trace: Trace, over: asyncio.Future[None]) -> None:
        self._request = request
        self._driver = driver
        self._trace = trace
        self._over = over
        self._response = HttpResponse()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if self._over.done():
            return
        try:
            for event in self._response.feed(data):
                self._trace.came(self._driver.tokens_of(event))
        except (MalformedResponseError, ValueError) as error:
            self._end(Outcome.FAILED, str(error))
            return
        if self._response.complete:
            self._finish()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._over.done():
            self._finish()

    def _finish(self) -> None:
        status = self._response.status
        if status == 200 and self._response.complete:
            self._end(Outcome.DONE)
        elif status in _OVERLOADED:
            self._end(Outcome.REFUSED, f"HTTP {status}")
        else:
            self._end(Outcome.FAILED, f"HTTP {status}: {self._response.body[:200].decode(errors='replace')}")

    def _end(self, outcome: Outcome, why: str = "") -> None:
        self._trace.end(outcome, why)
        self._over.set_result(None)
