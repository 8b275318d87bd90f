"""One submit call from its message to its decisions."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Final

import msgspec

from treadle_broker.connections import Connection, Connections
from treadle_broker.intake import INLINE_TEXT_BYTES, Intake, Prepared, invalid
from treadle_broker.library import StreamLibrary
from treadle_broker.plan import Event
from treadle_broker.publisher import Publisher
from treadle_broker.scheduler import Scheduler
from treadle_broker.session import SessionKey
from treadle_broker.side_thread import SideThread
from treadle_broker.stream import open_stream
from treadle_broker.text import Tokenizer
from treadle_shared.admission import AdmissionDecision, AdmissionReason
from treadle_shared.calls import Decision, Decisions, Failure, Request, Submit
from treadle_shared.errors import InvalidRequest, MalformedMessage
from treadle_shared.limits import MAX_REQUESTS
from treadle_shared.outcome import DoneReason
from treadle_shared.sampling import SamplingParams
from treadle_shared.tokens import pack_tokens

_BUSY_RETRY_S = 1.0  # a full side thread drains a text in well under this
_ANY_TOKEN: Final = pack_tokens(array("i", [0]))


class Submissions:
    """Decides on submit calls. The cheapest refusals come first: nothing is tokenised for a full queue."""

    def __init__(
        self,
        scheduler: Scheduler,
        intake: Intake,
        library: StreamLibrary,
        connections: Connections,
        publisher: Publisher,
        side: SideThread,
        tokenizer: Tokenizer,
        *,
        max_unread_tokens: int,
        resume_grace_s: float,
        unavailable: Callable[[], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._intake = intake
        self._library = library
        self._connections = connections
        self._publisher = publisher
        self._side = side
        self._tokenizer = tokenizer
        self._max_unread_tokens = max_unread_tokens
        self._unavailable = unavailable
        self._clock = clock
        self._resume_until = clock() + resume_grace_s
        self._ended: list[Event] = []

    def take(self, connection: Connection, call: Submit, context_tokens: int) -> None:
        """Answer now, or once a long text has been tokenised beside the loop."""
        if self._repeats(connection, call):
            return
        call = without_foreign_tokens(call, self._scheduler.facts.recipe_fingerprint)
        refusal = self._early_refusal(connection, call.requests, context_tokens)
        if refusal is not None:
            self._refuse_all(connection, call, refusal)
        elif sum(map(self._intake.text_bytes, call.requests)) <= INLINE_TEXT_BYTES:
            self._prepared(connection, call, lambda: self._prepare(connection.scope, call.requests))
        elif self._side.full:
            self._refuse_all(connection, call, _tokenizer_busy(call.requests[0].session_id))
        else:
            self._side.start(
                lambda: self._prepare(connection.scope, call.requests),
                lambda future: self._prepared(connection, call, future.result),
            )

    def refuse_malformed(
        self, connection: Connection, rid: int, requests: object, error: InvalidRequest | MalformedMessage
    ) -> None:
        """Answer a submit call of which some field is out of its bounds."""
        count = min(max(len(requests), 1), MAX_REQUESTS) if isinstance(requests, list) else 1
        field = error.field.replace("params.", "", 1)
        if count == 1:
            field = field.removeprefix("requests[0].")
        refusal = invalid("", InvalidRequest(field, error.problem))
        self._refuse(connection, rid, count, refusal)

    def tokenize(self, connection: Connection, rid: int, text: str, answer: Callable[[Future[object]], None]) -> None:
        """Tokenise a text beside the loop, whatever its length, and pass the future to ``answer``."""
        if self._side.full:
            connection.say(Failure(rid=rid, code="busy", field="text", message="too many long texts wait"))
        else:
            self._side.start(lambda: self._intake.tokenize(text), answer)

    # ---- before tokenising

    def _repeats(self, connection: Connection, call: Submit) -> bool:
        """The same request sent again, with the same secret, gets the same decision and no second session. From
        another connection, or as a resumption, it is then read from there.
        """
        known = [self._library.by_secret(request.key) for request in call.requests]
        if not all(known):
            return False
        streams = [stream for stream in known if stream is not None]
        connection.say(Decisions(rid=call.rid, decisions=[stream.decision() for stream in streams]))
        for stream, request in zip(streams, call.requests, strict=True):
            if request.emitted is not None or stream.reader != connection.address:
                self._connections.attach(connection, stream, len(request.emitted or b"") // 4)
        return True

    def _early_refusal(
        self, connection: Connection, requests: Sequence[Request], context_tokens: int
    ) -> AdmissionDecision | None:
        first = requests[0]
        why = self._unavailable()
        if why:
            return AdmissionDecision(
                reason=AdmissionReason.REJECTED_UNAVAILABLE, session_id=first.session_id, message=why
            )
        return (
            self._over_quota(connection, first)
            or self._known_secret(requests)
            or next(filter(None, (self._intake.too_long(request, context_tokens) for request in requests)), None)
            or self._full(connection, requests)
        )

    def _full(self, connection: Connection, requests: Sequence[Request]) -> AdmissionDecision | None:
        """A full queue turns new requests away before they are tokenised, resumed ones never at this point."""
        if self._resuming() and all(request.emitted is not None for request in requests):
            return None
        return self._scheduler.full_refusal(connection.scope, requests[0].session_id, len(requests), self._clock())

    def _resuming(self) -> bool:
        return self._clock() < self._resume_until

    def _over_quota(self, connection: Connection, request: Request) -> AdmissionDecision | None:
        unread = connection.unread_tokens
        if unread < self._max_unread_tokens:
            return None
        return AdmissionDecision(
            reason=AdmissionReason.REJECTED_QUOTA,
            session_id=request.session_id,
            budget="max_unread_tokens",
            needed=1,
            available=0,
            limit=self._max_unread_tokens,
            message=f"{unread} tokens of this client's sessions wait to be read",
        )

    def _known_secret(self, requests: Sequence[Request]) -> AdmissionDecision | None:
        """Part of a group was submitted before: neither a repetition nor new."""
        for request in requests:
            if self._library.by_secret(request.key) is not None:
                return AdmissionDecision(
                    reason=AdmissionReason.REJECTED_DUPLICATE,
                    session_id=request.session_id,
                    field="key",
                    message="this key belongs to an earlier request",
                )
        keys = [request.key for request in requests if request.key is not None]
        if len(set(keys)) == len(keys):
            return None
        return AdmissionDecision(
            reason=AdmissionReason.REJECTED_DUPLICATE,
            session_id=requests[0].session_id,
            field="key",
            message="two requests of one call share a key",
        )

    # ---- after tokenising

    def _prepare(self, client: str, requests: Sequence[Request]) -> list[Prepared]:
        prepared = []
        for index, request in enumerate(requests):
            try:
                prepared.append(self._intake.prepare(request, client))
            except InvalidRequest as error:
                field = error.field if len(requests) == 1 else f"requests[{index}].{error.field}"
                raise InvalidRequest(field, error.problem) from None
        return prepared

    def _prepared(self, connection: Connection, call: Submit, prepare: Callable[[], list[Prepared]]) -> None:
        if not self._connections.is_open(connection):  # it left while its text was being tokenised
            return
        try:
            prepared = prepare()
        except InvalidRequest as error:
            self._refuse_all(connection, call, invalid(call.requests[0].session_id, error))
            return
        if any(self._library.by_secret(item.secret) is not None for item in prepared):
            self._met_again(connection, call)
            return
        now = self._clock()
        jobs = [item.job(connection.scope, now, self._resuming()) for item in prepared]
        admissions = self._scheduler.submit(jobs, now)
        decisions = [
            self._open(connection, item, admission, now) if admission.accepted else Decision(admission=admission)
            for item, admission in zip(prepared, admissions, strict=True)
        ]
        self._answer(connection, call.rid, decisions)

    def _met_again(self, connection: Connection, call: Submit) -> None:
        """A key was used by another call while this one was being tokenised."""
        if self._repeats(connection, call):
            return
        refusal = self._known_secret(call.requests)
        assert refusal is not None
        self._refuse_all(connection, call, refusal)

    def _open(self, connection: Connection, item: Prepared, admission: AdmissionDecision, now: float) -> Decision:
        key = SessionKey(connection.scope, item.session_id, admission.epoch)
        stream = open_stream(
            key, item.secret, item.prompt, item.request, item.params, item.max_tokens, self._tokenizer, item.chain, now
        )
        stream.admission = admission
        stream.recipe = (item.request.recipe if item.emitted else "") or self._scheduler.facts.recipe_fingerprint
        stream.reader = connection.address
        connection.streams[stream] = None
        self._library.add(stream)
        stopped = stream.resume(item.emitted)
        digests = stream.new_digests()
        if digests:
            self._scheduler.extend(key, digests)
        if stopped:
            self._ended.extend(self._scheduler.stop(key, stream.emitted, DoneReason.STOP, now, "stop string"))
        return stream.decision()

    def take_ended(self) -> list[Event]:
        """Ends of resumed sessions that turned out to be complete, since the last call."""
        ended, self._ended = self._ended, []
        return ended

    # ---- answers

    def _refuse_all(self, connection: Connection, call: Submit, refusal: AdmissionDecision) -> None:
        self._refuse(connection, call.rid, len(call.requests), refusal)

    def _refuse(self, connection: Connection, rid: int, count: int, refusal: AdmissionDecision) -> None:
        for _ in range(count):
            self._scheduler.refuse(refusal)
        self._answer(connection, rid, [Decision(admission=refusal)] * count)

    def _answer(self, connection: Connection, rid: int, decisions: list[Decision]) -> None:
        connection.say(Decisions(rid=rid, decisions=decisions))
        self._connections.touch(connection)
        for decision in decisions:
            admission = decision.admission
            self._publisher.publish(
                "admission",
                {
                    "client": connection.scope,
                    "session_id": admission.session_id,
                    "reason": admission.reason.value,
                    "budget": admission.budget,
                    "needed": admission.needed,
                    "available": admission.available,
                    "retry_after_s": admission.retry_after_s,
                },
            )


def without_foreign_tokens(call: Submit, recipe: str) -> Submit:
    """The call, with nothing of another model in it that this one could trip over: a session that was begun with
    another recipe ends for that reason, not because its tokens or its length do not fit here.
    """
    if not any(request.emitted for request in call.requests):
        return call
    return msgspec.structs.replace(call, requests=[_unless_foreign(request, recipe) for request in call.requests])


def _unless_foreign(request: Request, recipe: str) -> Request:
    if not request.emitted or not recipe or request.recipe in ("", recipe) or request.params.seed is None:
        return request
    return msgspec.structs.replace(
        request,
        prompt=None,
        messages=None,
        tokens=_ANY_TOKEN,
        emitted=_ANY_TOKEN,
        max_tokens=2,
        params=SamplingParams(seed=request.params.seed),
        stop=[],
    )


def _tokenizer_busy(session_id: str) -> AdmissionDecision:
    return AdmissionDecision(
        reason=AdmissionReason.REJECTED_QUEUE_FULL,
        session_id=session_id,
        budget="tokenizer",
        needed=1,
        retry_after_s=_BUSY_RETRY_S,
        message="too many long texts wait to be tokenised",
    )
