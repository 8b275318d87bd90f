"""The client's side of the protocol, without I/O: bytes in, bytes out.

Whoever owns a ``Core`` moves its ``outgoing`` frames to the broker and the broker's frames to ``receive``,
and says when a connection is new (``connect``) or gone (``lose``). One owner at a time may call it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Any, Final

from treadle._call import Call
from treadle._resume import NOT_YET, RETRY_S, Resumption, resumed_request
from treadle._stream import Change, Stream, nothing_to_tell
from treadle.errors import ClientClosed, Unavailable, again, failure_error, local_overload, refusal
from treadle_shared import calls, codec
from treadle_shared.errors import InvalidRequest, MalformedMessage, TreadleError
from treadle_shared.limits import MAX_FRAME_BYTES, PROTOCOL_MAJOR, PROTOCOL_MINOR

MAX_OUTSTANDING_CALLS: Final = 16_384
"""Questions without an answer yet; each is a waiting caller, so more means that nobody waits for answers."""

CLIENT_NAME: Final = "treadle-python"


class State(Enum):
    """How the connection stands."""

    CONNECTING = "connecting"
    OPEN = "open"
    REFUSED = "refused"  # the node speaks another version: no new connection can help
    CLOSED = "closed"


_NEXT: Final = {
    State.CONNECTING: {State.CONNECTING, State.OPEN, State.REFUSED, State.CLOSED},
    State.OPEN: {State.CONNECTING, State.CLOSED},
    State.REFUSED: {State.REFUSED, State.CLOSED},
    State.CLOSED: {State.CLOSED},
}


class Core:
    """One client's connection: its calls by request id, its sessions by ``(session_id, epoch)``."""

    def __init__(
        self,
        name: str = CLIENT_NAME,
        resume_timeout_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._resumption = None if resume_timeout_s is None else Resumption(resume_timeout_s)
        self._clock = clock
        self._name = name
        self._state = State.CONNECTING
        self._why: TreadleError = Unavailable("the connection is not open yet")
        self._calls: dict[int, Call] = {}
        self._streams: dict[tuple[str, int], Stream] = {}
        self._outgoing: deque[bytes] = deque()
        self._next_rid = 1
        self.boot_id = ""
        self.dropped = 0  # messages for sessions or calls that are over
        self.on_state: Change = nothing_to_tell
        self.on_end: Change = nothing_to_tell  # after each session that is over

    @property
    def state(self) -> State:
        """How the connection stands."""
        return self._state

    @property
    def why(self) -> TreadleError:
        """The error to raise while the connection is not open."""
        return self._why

    def check(self) -> None:
        """Raise AssertionError where the books do not balance."""
        assert all(rid == call.rid and not call.settled for rid, call in self._calls.items())
        assert all(key == stream.key and not stream.ended for key, stream in self._streams.items())
        assert self._state is State.OPEN or not (self._calls or self._streams)

    # ---- the connection

    def connect(self) -> None:
        """A new connection begins: HELLO goes first, and nothing of the old one after it."""
        if self._state in (State.REFUSED, State.CLOSED):
            return
        self._outgoing.clear()
        self._outgoing.append(codec.encode(calls.Hello(major=PROTOCOL_MAJOR, minor=PROTOCOL_MINOR, client=self._name)))
        self._enter(State.CONNECTING)

    def lose(self, error: TreadleError) -> None:
        """The connection is gone, and with it every call; and every session that cannot be resumed."""
        self._keep_for_resumption()
        if self._state is State.OPEN:
            self._enter(State.CONNECTING, error)
        elif self._state is State.CONNECTING:
            self._why = error
        self._fail_all(error)

    def tend(self) -> float | None:
        """Offer lost sessions and give up those whose time is over; in how many seconds to call again, None: never.

        For whoever owns the core to call after every turn.
        """
        if self._resumption is None or not len(self._resumption):
            return None
        for stream in self._resumption.expired(self._clock()):
            stream.fail(again(self._why))
        if self._state is State.OPEN:
            for stream in self._resumption.offers(self._clock()):
                self._offer(stream)
        return RETRY_S

    def _offer(self, stream: Stream) -> None:
        if stream.cancelled_here:
            self._resumption_of(stream).drop(stream)
            stream.fail(Unavailable("the session was cancelled while no broker was there"))
            return
        request = resumed_request(stream)
        self._ask(lambda rid: calls.Submit(rid=rid, requests=[request]), (stream,), resumes=True)

    def _keep_for_resumption(self) -> None:
        if self._resumption is None:
            return
        offered = [stream for call in self._calls.values() if call.resumes for stream in call.streams]
        self._calls = {rid: call for rid, call in self._calls.items() if not call.resumes}
        for stream in [*self._streams.values(), *offered]:
            if stream not in self._resumption:
                stream.lost()
            self._resumption.lost(stream, self._clock())
        self._streams.clear()

    def _resumption_of(self, stream: Stream) -> Resumption:
        assert self._resumption is not None
        return self._resumption

    def cancel_all(self) -> None:
        """The caller is about to close: end every session, so that their ends can still be heard."""
        for stream in list(self._streams.values()):
            self.cancel(stream)

    @property
    def live(self) -> int:
        """Sessions whose end has not come, and is still to be heard on this connection."""
        return len(self._streams)

    def close(self) -> None:
        """The caller is done; GOODBYE cancels what is left."""
        said_hello = self._state is State.OPEN
        error = ClientClosed("the client is closed")
        self._enter(State.CLOSED, error)
        self._fail_all(error)
        for stream in self._resumption.clear() if self._resumption else ():
            stream.fail(again(error))
        self._outgoing.clear()
        if said_hello:
            self._outgoing.append(codec.encode(calls.Goodbye()))

    def next_frame(self) -> bytes | None:
        """The frame to send next; it stays until ``sent``."""
        return self._outgoing[0] if self._outgoing else None

    def sent(self) -> None:
        """The next frame is on its way."""
        self._outgoing.popleft()

    # ---- questions

    def submit(self, requests: list[calls.Request]) -> Call:
        """Submit requests together. Raises Unavailable, InvalidRequest where they do not fit a frame."""
        streams = tuple(Stream(request) for request in requests)
        return self._ask(lambda rid: calls.Submit(rid=rid, requests=requests), streams)

    def cancel(self, stream: Stream) -> Call:
        """End one session. One that has ended is not found; one not decided on yet ends as soon as it is."""
        stream.cancelled_here = True
        if stream.ended or stream.decision is None or self._state is not State.OPEN:
            call = Call(rid=0)
            call.settle(calls.Cancelled(rid=0, found=False))
            return call
        return self._cancel(stream, stream.decision)

    def _cancel(self, stream: Stream, decision: calls.Decision) -> Call:
        session_id, epoch = stream.key
        key = decision.key or stream.request.key
        return self._ask(lambda rid: calls.Cancel(rid=rid, session_id=session_id, epoch=epoch, key=key))

    def cancel_by_id(self, session_id: str, epoch: int | None) -> Call:
        """End any session, as the control endpoint allows."""
        return self._ask(lambda rid: calls.Cancel(rid=rid, session_id=session_id, epoch=epoch))

    def tokenize(self, text: str) -> Call:
        """Token ids of a text."""
        return self._ask(lambda rid: calls.Tokenize(rid=rid, text=text))

    def ask(self, what: str) -> Call:
        """A fact by its name."""
        return self._ask(lambda rid: calls.Ask(rid=rid, what=what))

    def drain(self, timeout_s: float | None) -> Call:
        """Refuse what is new, finish what runs, stop."""
        return self._ask(lambda rid: calls.Drain(rid=rid, timeout_s=timeout_s))

    def abandon(self, call: Call) -> None:
        """The caller no longer waits; what a submission still starts is cancelled."""
        call.abandoned = True
        for stream in call.streams:
            self.cancel(stream)

    def _ask(
        self, message: Callable[[int], calls.FromClient], streams: tuple[Stream, ...] = (), *, resumes: bool = False
    ) -> Call:
        if self._state is not State.OPEN:
            raise again(self._why)
        if len(self._calls) >= MAX_OUTSTANDING_CALLS:
            raise local_overload("outstanding_calls", MAX_OUTSTANDING_CALLS)
        frame = codec.encode(message(self._next_rid))
        if len(frame) > MAX_FRAME_BYTES:
            raise InvalidRequest("requests", f"{len(frame)} bytes together, at most {MAX_FRAME_BYTES} can be sent")
        call = Call(self._next_rid, streams, resumes=resumes)
        self._next_rid += 1
        self._calls[call.rid] = call
        self._outgoing.append(frame)
        return call

    # ---- answers

    def receive(self, frame: bytes) -> None:
        """Take one frame of the broker in. Raises MalformedMessage; the connection is then of no more use."""
        for message in codec.decode_to_client(frame):
            self._take(message)

    def _take(self, message: calls.ToClient) -> None:
        match message:
            case calls.Delta() | calls.Position() | calls.Started() | calls.Recovering() | calls.Done():
                self._event(message)
            case calls.Decisions():
                self._decided(message)
            case calls.Welcome():
                self._welcome(message)
            case calls.Failure():
                self._failure(message)
            case _:
                self._answer(message.rid, message)

    def _welcome(self, message: calls.Welcome) -> None:
        if self._state is not State.CONNECTING:
            return
        self.boot_id = message.boot_id
        self._enter(State.OPEN)

    def _failure(self, message: calls.Failure) -> None:
        error = failure_error(message)
        if message.code == "hello_first":
            self._forgotten()
        elif message.code == "version":
            self._enter(State.REFUSED, error)
            self._fail_all(error)
        elif message.rid is not None:
            self._answer(message.rid, error=error)
        else:  # the broker could not tell which question it was: none may wait for ever
            for rid in list(self._calls):
                self._answer(rid, error=error)

    def _forgotten(self) -> None:
        """The broker does not know this client: it has restarted."""
        if self._state is State.OPEN:
            self.lose(Unavailable("the broker was restarted; its sessions are gone"))
            self.connect()

    def _decided(self, message: calls.Decisions) -> None:
        call = self._calls.get(message.rid)
        if call is None or len(message.decisions) != len(call.streams):
            self._answer(message.rid, error=MalformedMessage("decisions that nobody asked for", "decisions"))
            return
        if call.resumes:
            self._resumed(call, message)
            return
        admissions = [decision.admission for decision in message.decisions]
        for stream, decision in zip(call.streams, message.decisions, strict=True):
            stream.decide(decision)
            if decision.admission.accepted:
                self._streams[stream.key] = stream
        refused = next((admission for admission in admissions if not admission.accepted), None)
        self._answer(message.rid, message, error=refusal(refused, admissions) if refused else None)
        if refused or call.abandoned:
            self._give_up(call.streams)

    def _resumed(self, call: Call, message: calls.Decisions) -> None:
        """A broker's answer to a lost session's offer."""
        (stream,), (decision,) = call.streams, message.decisions
        resumption = self._resumption_of(stream)
        if decision.admission.reason in NOT_YET:
            resumption.refused(stream, self._clock())
        else:
            resumption.drop(stream)
            if decision.admission.accepted:
                stream.decide(decision)
                self._streams[stream.key] = stream
            else:
                stream.fail(refusal(decision.admission, [decision.admission]))
        self._answer(message.rid, message)
        if stream.cancelled_here:
            self.cancel(stream)

    def _give_up(self, streams: tuple[Stream, ...]) -> None:
        """Cancel what was accepted of a submission that nobody holds."""
        for stream in streams:
            if stream.admission and stream.admission.accepted:
                self.cancel(stream)

    def _event(self, message: Any) -> None:
        stream = self._streams.get((message.session_id, message.epoch))
        if stream is None:
            self.dropped += 1
            return
        _EVENTS[type(message)](stream, message)
        if not stream.ended:
            return
        del self._streams[stream.key]
        self.on_end()
        if stream.error is not None and stream.decision is not None:
            self._cancel(stream, stream.decision)  # broken on this side; the node still runs it

    def _answer(self, rid: int, reply: Any = None, error: TreadleError | None = None) -> None:
        call = self._calls.pop(rid, None)
        if call is None:
            self.dropped += 1
            return
        call.settle(None if error else reply, error)

    # ---- state

    def _enter(self, state: State, why: TreadleError | None = None) -> None:
        if state not in _NEXT[self._state]:
            raise AssertionError(f"{self._state} → {state} is not a step of a connection")
        self._state = state
        if why is not None:
            self._why = why
        self.on_state()

    def _fail_all(self, error: TreadleError) -> None:
        lost_calls, lost_streams = list(self._calls.values()), list(self._streams.values())
        self._calls.clear()
        self._streams.clear()
        for call in lost_calls:
            call.settle(error=again(error))
        for stream in lost_streams:
            stream.fail(again(error))
        self.on_end()


_EVENTS: Final[dict[type, Callable[[Stream, Any], None]]] = {
    calls.Delta: Stream.delta,
    calls.Position: Stream.position,
    calls.Started: Stream.started,
    calls.Recovering: Stream.recovering,
    calls.Done: Stream.finish,
}
