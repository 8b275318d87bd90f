"""The front desk: what clients and operators say, and what they are told."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

import zmq

from treadle_broker.connections import Connection, Connections, scope_of
from treadle_broker.delivery import Delivery
from treadle_broker.library import StreamLibrary
from treadle_broker.scheduler import Scheduler
from treadle_broker.stream import Stream
from treadle_broker.submissions import Submissions
from treadle_shared.calls import (
    Ask,
    Attach,
    Attached,
    Cancel,
    Cancelled,
    Drain,
    Facts,
    Failure,
    FromClient,
    Goodbye,
    Hello,
    Submit,
    ToClient,
    Tokenize,
    Tokenized,
    Welcome,
)
from treadle_shared.codec import convert_from_client, encode, unpack
from treadle_shared.errors import InvalidRequest, MalformedMessage
from treadle_shared.limits import MAX_DETAIL, MAX_NAME, MAX_TOKENS_BYTES, PROTOCOL_MAJOR, PROTOCOL_MINOR
from treadle_shared.tokens import pack_tokens

_BURST = 256  # messages read from clients in one turn of the loop: a flood cannot hold it
_BURST_BYTES = 256 << 10  # and bytes of them: one large frame a turn


class Node(Protocol):
    """What the desk asks of the node around it."""

    @property
    def boot_id(self) -> str:
        """This start of the broker."""
        ...

    @property
    def context_tokens(self) -> int:
        """What one session holds."""
        ...

    def facts(self, what: str, admin: bool) -> dict[str, Any] | None:
        """JSON-safe facts, or None where ``what`` is not a known (or permitted) question."""
        ...

    def begin_drain(self, timeout_s: float | None) -> None:
        """Refuse what is new, finish what runs, then stop."""
        ...

    def cancel_orphans_of(self, scope: str) -> None:
        """End the sessions of a client that vanished, and then said goodbye after all."""
        ...


class Desk:
    """Reads one socket's messages and answers them. ``admin``: the operator's endpoint."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        admin: bool,
        node: Node,
        scheduler: Scheduler,
        library: StreamLibrary,
        connections: Connections,
        submissions: Submissions,
        delivery: Delivery,
    ) -> None:
        self.malformed = 0
        self._socket = socket
        self._admin = admin
        self._node = node
        self._scheduler = scheduler
        self._library = library
        self._connections = connections
        self._submissions = submissions
        self._delivery = delivery
        self._handlers: dict[type, Callable[[Connection, Any, float], None]] = {
            Submit: self._submit,
            Cancel: self._cancel,
            Attach: self._attach,
            Tokenize: self._tokenize,
            Ask: self._ask,
            Drain: self._drain,
            Goodbye: self._goodbye,
        }

    def serve(self, now: float) -> None:
        """Answer what has arrived, up to a bound."""
        taken = size = 0
        while taken < _BURST and size < _BURST_BYTES:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            taken += 1
            size += sum(map(len, frames))
            self._handle(frames, now)

    def gone(self, connection: Connection) -> list[Stream]:
        """Forget a connection that no longer stands; returns the streams nobody reads now."""
        return self._connections.close(connection)

    # ---- messages

    def _handle(self, frames: list[bytes], now: float) -> None:
        identity = frames[0]
        if len(frames) != 2:
            self._fail(identity, Failure(code="malformed", message=f"{len(frames) - 1} frames instead of one"))
            return
        rid, value = None, None
        try:
            value = unpack(frames[1])
            rid = _rid(value)
            message = convert_from_client(value)
        except (InvalidRequest, MalformedMessage) as error:
            self._reject(identity, value, rid, error)
            return
        self._dispatch(identity, message, rid, now)

    def _reject(self, identity: bytes, value: Any, rid: int | None, error: InvalidRequest | MalformedMessage) -> None:
        """A submission with a bad field is refused like any other; every other bad message fails."""
        connection = self._connections.get(self._admin, identity)
        if connection is not None and rid is not None and value.get("type") == "submit":
            requests = value.get("requests")
            self._submissions.refuse_malformed(connection, rid, requests, error)
            return
        code = "invalid" if isinstance(error, InvalidRequest) or (rid is not None and error.field) else "malformed"
        self._fail(identity, _failure(rid, code, error.field, error.problem))

    def _dispatch(self, identity: bytes, message: FromClient, rid: int | None, now: float) -> None:
        connection = self._connections.get(self._admin, identity)
        if isinstance(message, Hello):
            self._hello(identity, message, now)
        elif connection is None and isinstance(message, Goodbye):
            self._node.cancel_orphans_of(
                scope_of(self._admin, identity)
            )  # a failed send was noticed before its last word was read
        elif connection is None:
            self._fail(identity, _failure(rid, "hello_first", "", "say hello before anything else"))
        else:
            self._handlers[type(message)](connection, message, now)
            self._connections.touch(connection)

    def _hello(self, identity: bytes, hello: Hello, now: float) -> None:
        if hello.major != PROTOCOL_MAJOR:
            words = f"this broker speaks version {PROTOCOL_MAJOR}.{PROTOCOL_MINOR}, not {hello.major}.{hello.minor}"
            self._fail(identity, _failure(None, "version", "major", words))
            return
        connection = self._connections.get(self._admin, identity)
        if connection is None:
            connection = Connection(identity, self._socket, self._admin, hello.client, last_sent=now)
            self._connections.open(connection)
        minor = min(hello.minor, PROTOCOL_MINOR)
        connection.say(Welcome(major=PROTOCOL_MAJOR, minor=minor, boot_id=self._node.boot_id))
        self._connections.touch(connection)

    def _submit(self, connection: Connection, call: Submit, now: float) -> None:
        self._submissions.take(connection, call, self._node.context_tokens)

    def _cancel(self, connection: Connection, call: Cancel, now: float) -> None:
        found = False
        for stream in self._cancelled(call):
            self._delivery.take(self._scheduler.cancel(stream.key, now), now)
            found = True
        connection.say(Cancelled(rid=call.rid, found=found))

    def _cancelled(self, call: Cancel) -> list[Stream]:
        """Live streams that the call names by exact id and may end."""
        if self._admin and call.key is None:
            streams = list(self._library.named(call.session_id))
        else:
            owned = self._library.by_secret(call.key)
            streams = [] if owned is None or owned.key.session_id != call.session_id else [owned]
        live = [stream for stream in streams if stream.done is None]
        return [stream for stream in live if call.epoch in (None, stream.key.epoch)]

    def _attach(self, connection: Connection, call: Attach, now: float) -> None:
        stream = self._library.by_secret(call.key)
        if stream is None or (stream.key.session_id, stream.key.epoch) != (call.session_id, call.epoch):
            connection.say(Attached(rid=call.rid, found=False))
            return
        connection.say(Attached(rid=call.rid, found=True))
        self._connections.attach(connection, stream, call.have_tokens)

    def _tokenize(self, connection: Connection, call: Tokenize, now: float) -> None:
        def answer(future: Future[Any]) -> None:
            connection.say(_tokenized(call.rid, future))
            self._connections.touch(connection)

        self._submissions.tokenize(connection, call.rid, call.text, answer)

    def _ask(self, connection: Connection, call: Ask, now: float) -> None:
        facts = self._node.facts(call.what, self._admin)
        if facts is None:
            connection.say(_failure(call.rid, "invalid", "what", f"{call.what!r} is not a question asked here"))
        else:
            connection.say(Facts(rid=call.rid, facts=facts))

    def _drain(self, connection: Connection, call: Drain, now: float) -> None:
        if not self._admin:
            connection.say(_failure(call.rid, "forbidden", "", "drain is for the control endpoint"))
            return
        self._node.begin_drain(call.timeout_s)
        connection.say(Facts(rid=call.rid, facts={"draining": True}))

    def _goodbye(self, connection: Connection, call: Goodbye, now: float) -> None:
        for stream in self.gone(connection):
            self._delivery.take(self._scheduler.cancel(stream.key, now, detail="client closed"), now)

    def _fail(self, identity: bytes, failure: Failure) -> None:
        """Answer somebody who may have no connection; whoever cannot take the answer goes without."""
        self.malformed += failure.code in ("malformed", "version")
        messages: list[ToClient] = [failure]
        try:
            self._socket.send_multipart([identity, encode(messages)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise


def _rid(value: Any) -> int | None:
    rid = value.get("rid") if isinstance(value, dict) else None
    return rid if isinstance(rid, int) and not isinstance(rid, bool) and 0 <= rid < 1 << 53 else None


def _failure(rid: int | None, code: str, field: str, message: str) -> Failure:
    return Failure(rid=rid, code=code, field=field[:MAX_NAME], message=message[:MAX_DETAIL])


def _tokenized(rid: int, future: Future[Any]) -> Tokenized | Failure:
    try:
        tokens = pack_tokens(future.result())
    except InvalidRequest as error:
        return _failure(rid, "invalid", error.field, error.problem)
    if len(tokens) > MAX_TOKENS_BYTES:
        return _failure(rid, "invalid", "text", f"has {len(tokens) // 4} tokens, more than an answer can hold")
    return Tokenized(rid=rid, tokens=tokens)
