"""What is known of one session: filled by the protocol core, read by the session objects of both twins."""

from __future__ import annotations

from array import array
from collections.abc import Callable

from treadle.errors import SessionEnded, end_error
from treadle.events import Done, Event, QueuePosition, Recovering, Started, TextDelta, TokenLogprob
from treadle_shared import AdmissionDecision, DoneReason, calls
from treadle_shared.errors import MalformedMessage, TreadleError
from treadle_shared.tokens import unpack_tokens

Change = Callable[[], None]


def nothing_to_tell() -> None:
    """The ``on_change`` of what nobody waits for."""


class Stream:
    """One session from submission to end.

    ``events`` only grows and holds what came, in order; ``error`` is set where the stream broke off without a
    Done. ``on_change`` is called after every change. Reading needs no lock: each field is replaced or
    appended to at once, and ``ended`` turns true last.
    """

    def __init__(self, request: calls.Request) -> None:
        self.request = request
        self.decision: calls.Decision | None = None
        self.events: list[Event] = []
        self.texts: list[str] = []
        self.tokens = array("i")
        self.logprobs: list[TokenLogprob] = []
        self.done: Done | None = None
        self.end: SessionEnded | None = None  # the error that ``done`` stands for
        self.error: TreadleError | None = None
        self.recipe = ""  # what the tokens were computed with, for whoever resumes them
        self.cancelled_here = False  # this caller asked for the end, so it is no error
        self.on_change: Change = nothing_to_tell

    @property
    def admission(self) -> AdmissionDecision | None:
        """The node's answer, once it is there."""
        return self.decision.admission if self.decision else None

    @property
    def key(self) -> tuple[str, int]:
        """``(session_id, epoch)`` of an accepted session."""
        admission = self.admission
        assert admission is not None, "the session has not been decided on"
        return admission.session_id, admission.epoch

    @property
    def ended(self) -> bool:
        """Whether nothing more will come."""
        return self.done is not None or self.error is not None

    def decide(self, decision: calls.Decision) -> None:
        """The node's answer to the submission."""
        self.decision = decision
        if not self.tokens:
            self.recipe = decision.recipe
        self.on_change()

    def fail(self, error: TreadleError) -> None:
        """The stream breaks off: the connection or the client is gone."""
        if self.ended:
            return
        self.error = error
        self.on_change()

    def lost(self) -> None:
        """The connection is gone; the session is offered to whichever broker comes next."""
        self._tell(Recovering("the broker went away"))

    def position(self, message: calls.Position) -> None:
        """The session moved in the queue."""
        self._tell(QueuePosition(message.ahead))

    def started(self, message: calls.Started) -> None:
        """The session left the queue."""
        self._tell(Started(message.queued_s))

    def recovering(self, message: calls.Recovering) -> None:
        """The session is being rebuilt."""
        self._tell(Recovering(message.why))

    def delta(self, message: calls.Delta) -> None:
        """New tokens. A gap before them breaks the stream: no text is better than wrong text."""
        tokens = unpack_tokens(message.tokens)
        if message.index != len(self.tokens):
            have = len(self.tokens)
            self.fail(MalformedMessage(f"the stream went on at token {message.index}, but {have} had come", "index"))
            return
        logprobs = tuple([_logprob(item) for item in message.logprobs]) if message.logprobs else ()
        self.recipe = message.recipe or self.recipe
        self.tokens.extend(tokens)
        self.logprobs.extend(logprobs)
        if message.text:
            self.texts.append(message.text)
        self._tell(TextDelta(message.text, tuple(tokens), message.index, logprobs))

    def finish(self, message: calls.Done) -> None:
        """The session's end."""
        if message.reason is not DoneReason.CANCELLED or not self.cancelled_here:
            self.end = end_error(message.reason, message.session_id, message.detail, "".join(self.texts))
        done = Done(
            finish_reason=message.reason.value.lower(),
            usage=message.usage,
            timings=message.timings,
            detail=message.detail,
            stop=message.stop,
            exact=message.exact,
        )
        self.events.append(done)
        self.done = done
        self.on_change()

    def _tell(self, event: Event) -> None:
        self.events.append(event)
        self.on_change()


def _logprob(item: calls.Logprob) -> TokenLogprob:
    return TokenLogprob(item.token, item.logprob, tuple((token, value) for token, value in item.top))
