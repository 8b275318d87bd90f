"""A broker of one thread that speaks the real protocol over real sockets and makes its answers up.

It answers every prompt with the prompt's own words, one a turn, so a test knows what must come. What it
refuses, how many sessions run at once, and when it stands still are the test's to say.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import zmq

from treadle_shared import AdmissionDecision, AdmissionReason, DoneReason, calls, codec
from treadle_shared.bytevocab import encode_bytes
from treadle_shared.errors import InvalidRequest, MalformedMessage
from treadle_shared.limits import PROTOCOL_MAJOR, PROTOCOL_MINOR
from treadle_shared.rundir import NodeLock, RuntimeDir
from treadle_shared.tokens import pack_tokens, unpack_tokens

TURN_MS = 2
SOCKET_HWM = 0


@dataclass
class Running:
    """One accepted session. ``left`` are the words still to be sent."""

    endpoint: str
    client: bytes
    session_id: str
    epoch: int
    key: bytes
    left: deque[str]
    max_tokens: int
    logprobs: bool
    sent: int = 0
    started: bool = False
    total: int = field(init=False)

    def __post_init__(self) -> None:
        self.total = len(self.left)


class FakeBroker:
    """Use as a context manager. Attributes may be set at any time by the test's thread."""

    def __init__(self, directory: RuntimeDir, boot_id: str = "boot-1", major: int = PROTOCOL_MAJOR) -> None:
        self.directory = directory
        self.boot_id = boot_id
        self.major = major
        self.slots = 1_000
        self.refuse: Callable[[calls.Request], AdmissionDecision | None] = lambda request: None
        self.end_with: dict[str, tuple[DoneReason, str]] = {}  # prompt → how it ends after its first word
        self.facts: dict[str, dict[str, Any]] = {"status": {"ready": True}, "model": {"name": "fake"}, "telemetry": {}}
        self.silent: set[type] = set()  # messages that get no answer
        self.go = threading.Event()  # cleared: no session gets on
        self.go.set()
        self.seen: list[calls.FromClient] = []
        self.skip_token_at: int | None = None
        self.forget_clients = threading.Event()
        self.recover = threading.Event()
        self.garbage: bytes | None = None
        self._running: dict[tuple[str, int], Running] = {}
        self._epochs: dict[str, int] = {}
        self._known: set[tuple[str, bytes]] = set()
        self._out: dict[tuple[str, bytes], list[calls.ToClient]] = {}
        self._stop = threading.Event()
        self._up = threading.Event()
        self._lock = NodeLock(directory)
        self._thread = threading.Thread(target=self._run, name="fake-broker", daemon=True)

    def __enter__(self) -> FakeBroker:
        self.directory.create()
        self._lock.acquire()
        self._thread.start()
        assert self._up.wait(5.0)
        return self

    def __exit__(self, *_: object) -> None:
        self.die()

    def die(self) -> None:
        """Close the sockets without a word, as a killed process would."""
        self._stop.set()
        self._thread.join(5.0)
        self._lock.release()
        assert not self._thread.is_alive()

    @property
    def live(self) -> int:
        """Sessions that have not ended."""
        return len(self._running)

    def count(self, kind: type) -> int:
        """How many messages of one kind have come."""
        return sum(isinstance(message, kind) for message in list(self.seen))

    # ---- the loop

    def _run(self) -> None:
        with zmq.Context[zmq.Socket[bytes]]() as context:
            sockets = {name: context.socket(zmq.ROUTER) for name in ("clients", "control")}
            poller = zmq.Poller()
            for name, socket in sockets.items():
                socket.set_hwm(SOCKET_HWM)
                socket.setsockopt(zmq.LINGER, 0)
                socket.bind(getattr(self.directory, name))
                poller.register(socket, zmq.POLLIN)
            self._up.set()
            while not self._stop.is_set():
                poller.poll(TURN_MS)
                self._turn(sockets)
            for socket in sockets.values():
                socket.close()

    def _turn(self, sockets: dict[str, zmq.Socket[bytes]]) -> None:
        for name, socket in sockets.items():
            while socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:  # type: ignore[operator]
                client, frame = socket.recv_multipart()
                self._receive(name, client, frame)
        if self.go.is_set():
            self._advance()
        for (name, client), messages in self._out.items():
            sockets[name].send_multipart([client, codec.encode(messages)])
        self._out.clear()
        if self.garbage is not None:
            for name, client in self._known:
                sockets[name].send_multipart([client, self.garbage])
            self.garbage = None

    def _tell(self, endpoint: str, client: bytes, message: calls.ToClient) -> None:
        self._out.setdefault((endpoint, client), []).append(message)

    def _receive(self, endpoint: str, client: bytes, frame: bytes) -> None:
        if self.forget_clients.is_set():
            self._known.clear()
            self.forget_clients.clear()
        try:
            message = codec.decode_from_client(frame)
        except (MalformedMessage, InvalidRequest) as error:
            rid = codec.unpack(frame).get("rid")
            code = "invalid" if isinstance(error, InvalidRequest) else "malformed"
            self._tell(endpoint, client, calls.Failure(rid=rid, code=code, field=error.field, message=error.problem))
            return
        self.seen.append(message)
        if type(message) not in self.silent:
            self._answer(endpoint, client, message)

    def _answer(self, endpoint: str, client: bytes, message: calls.FromClient) -> None:
        if isinstance(message, calls.Hello):
            self._hello(endpoint, client, message)
            return
        if (endpoint, client) not in self._known:
            rid = getattr(message, "rid", None)
            self._tell(endpoint, client, calls.Failure(rid=rid, code="hello_first"))
            return
        match message:
            case calls.Submit():
                self._submit(endpoint, client, message)
            case calls.Cancel():
                self._cancel(endpoint, client, message)
            case calls.Tokenize():
                tokens = pack_tokens(encode_bytes(message.text))
                self._tell(endpoint, client, calls.Tokenized(rid=message.rid, tokens=tokens))
            case calls.Ask():
                self._ask(endpoint, client, message)
            case calls.Drain():
                self._drain(endpoint, client, message)
            case calls.Goodbye():
                self._goodbye(endpoint, client)

    def _hello(self, endpoint: str, client: bytes, message: calls.Hello) -> None:
        if message.major != self.major:
            text = f"this node speaks version {self.major}"
            self._tell(endpoint, client, calls.Failure(code="version", field="major", message=text))
            return
        self._known.add((endpoint, client))
        self._tell(endpoint, client, calls.Welcome(major=self.major, minor=PROTOCOL_MINOR, boot_id=self.boot_id))

    # ---- sessions

    def _submit(self, endpoint: str, client: bytes, message: calls.Submit) -> None:
        refusals = [self.refuse(request) for request in message.requests]
        if any(refusals):
            fallback = AdmissionDecision(reason=AdmissionReason.REJECTED_QUEUE_FULL, session_id="")
            decisions = [calls.Decision(admission=refusal or fallback) for refusal in refusals]
        else:
            decisions = [self._accept(endpoint, client, request) for request in message.requests]
        self._tell(endpoint, client, calls.Decisions(rid=message.rid, decisions=decisions))

    def _accept(self, endpoint: str, client: bytes, request: calls.Request) -> calls.Decision:
        session_id = request.session_id or f"s-{len(self._epochs)}"
        epoch = self._epochs[session_id] = self._epochs.get(session_id, 0) + 1
        words = _words(request)
        ahead = max(0, self.live - self.slots + 1)
        running = Running(
            endpoint=endpoint,
            client=client,
            session_id=session_id,
            epoch=epoch,
            key=request.key or bytes(16),
            left=deque(words),
            max_tokens=request.max_tokens or len(words),
            logprobs=request.params.logprobs is not None,
        )
        self._running[session_id, epoch] = running
        admission = AdmissionDecision(
            reason=AdmissionReason.QUEUED if ahead else AdmissionReason.ADMITTED,
            session_id=session_id,
            epoch=epoch,
            position=ahead,
        )
        seed = 7 if request.params.seed is None else request.params.seed
        return calls.Decision(
            admission=admission,
            seed=seed,
            key=running.key,
            prompt_tokens=len(words),
            max_tokens=running.max_tokens,
        )

    def _advance(self) -> None:
        for place, running in enumerate(list(self._running.values())):
            if place >= self.slots:
                ahead = place - self.slots
                self._event(running, calls.Position(session_id=running.session_id, epoch=running.epoch, ahead=ahead))
            else:
                self._step(running)
        self.recover.clear()

    def _step(self, running: Running) -> None:
        ids = {"session_id": running.session_id, "epoch": running.epoch}
        if not running.started:
            running.started = True
            self._event(running, calls.Started(**ids, queued_s=0.0))
            return
        if self.recover.is_set():
            self._event(running, calls.Recovering(**ids, why="the worker was lost"))
        prompt_end = self.end_with.get(running.left[0]) if running.left else None
        if running.left and running.sent < running.max_tokens:
            self._word(running, running.left.popleft())
        if prompt_end is not None:
            self._end(running, *prompt_end)
        elif not running.left:
            self._end(running, DoneReason.STOP)
        elif running.sent >= running.max_tokens:
            self._end(running, DoneReason.LENGTH)

    def _word(self, running: Running, word: str) -> None:
        index = running.sent + (1 if self.skip_token_at == running.sent else 0)
        logprobs = [calls.Logprob(running.sent, -0.5, [(running.sent, -0.5)])] if running.logprobs else []
        self._event(
            running,
            calls.Delta(
                session_id=running.session_id,
                epoch=running.epoch,
                index=index,
                tokens=pack_tokens([running.sent]),
                text=word,
                logprobs=logprobs,
            ),
        )
        running.sent += 1

    def _end(self, running: Running, reason: DoneReason, detail: str = "") -> None:
        self._running.pop((running.session_id, running.epoch), None)
        usage = calls.Usage(prompt_tokens=running.total, completion_tokens=running.sent)
        timings = calls.SessionTimings(queued_s=0.0, ttft_s=0.1, total_s=0.2)
        self._event(
            running,
            calls.Done(
                session_id=running.session_id,
                epoch=running.epoch,
                reason=reason,
                detail=detail,
                usage=usage,
                timings=timings,
                exact=True,
            ),
        )

    def _event(self, running: Running, message: calls.ToClient) -> None:
        self._tell(running.endpoint, running.client, message)

    def _cancel(self, endpoint: str, client: bytes, message: calls.Cancel) -> None:
        epoch = message.epoch or self._epochs.get(message.session_id, 0)
        running = self._running.get((message.session_id, epoch))
        allowed = running is not None and (endpoint == "control" or message.key == running.key)
        self._tell(endpoint, client, calls.Cancelled(rid=message.rid, found=allowed))
        if running is not None and allowed:
            self._end(running, DoneReason.CANCELLED)

    # ---- the rest

    def _ask(self, endpoint: str, client: bytes, message: calls.Ask) -> None:
        if message.what == "sessions" and endpoint != "control":
            self._tell(endpoint, client, calls.Failure(rid=message.rid, code="forbidden", field="what"))
            return
        sessions = [
            {"session_id": session_id, "epoch": epoch, "state": "DECODING"} for session_id, epoch in self._running
        ]
        facts = {"sessions": sessions} if message.what == "sessions" else self.facts[message.what]
        self._tell(endpoint, client, calls.Facts(rid=message.rid, facts=facts))

    def _drain(self, endpoint: str, client: bytes, message: calls.Drain) -> None:
        self._tell(endpoint, client, calls.Facts(rid=message.rid, facts={"draining": True, "active": self.live}))
        for running in list(self._running.values()):
            self._end(running, DoneReason.CANCELLED, "drained")
        self._stop.set()
        self._lock.release()

    def _goodbye(self, endpoint: str, client: bytes) -> None:
        self._known.discard((endpoint, client))
        for key, running in list(self._running.items()):
            if (running.endpoint, running.client) == (endpoint, client):
                del self._running[key]


def _words(request: calls.Request) -> list[str]:
    if request.tokens is not None:
        return [f"<{token}>" for token in unpack_tokens(request.tokens)]
    text = request.prompt if request.prompt is not None else (request.messages or [])[-1].content
    head, *rest = text.split(" ")
    return [head, *(f" {word}" for word in rest)]
