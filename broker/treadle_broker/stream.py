"""One session's answer as a log: tokens and the text each completed, read by a cursor."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from treadle_broker.plan import Emitted, Finished
from treadle_broker.prefix_hash import Chain
from treadle_broker.session import SessionKey
from treadle_broker.text import AnswerText, Tokenizer
from treadle_shared.admission import AdmissionDecision
from treadle_shared.calls import Decision, Delta, Done, Logprob, Request, SessionTimings, Usage
from treadle_shared.outcome import DoneReason
from treadle_shared.sampling import SamplingParams
from treadle_shared.tokens import pack_tokens

MAX_DELTA_TOKENS = 1024  # tokens in one message: a reader far behind gets its backlog in pieces


class Stream:
    """Everything a session said so far. ``sequence`` is the prompt, then every emitted token.

    ``parts[i]`` is the text that token ``i`` completed; after the end one more part may hold what was held back.
    ``sent`` is the cursor: how many parts the subscriber has.
    """

    def __init__(
        self,
        key: SessionKey,
        secret: bytes,
        prompt: array[int],
        params: SamplingParams,
        max_tokens: int,
        text: AnswerText,
        chain: Chain,
        now: float,
    ) -> None:
        self.key = key
        self.secret = secret
        self.params = params
        self.sequence = array("i", prompt)
        self.prompt_tokens = len(prompt)
        self.max_tokens = max_tokens
        self.recipe = ""  # what its tokens are computed with, once that is known
        self.admission: AdmissionDecision | None = None
        self.reader: tuple[bool, bytes] | None = None  # the address of the connection that reads it
        self.sent = 0
        self.done: Done | None = None
        self.done_sent = False
        self.ended_at: float | None = None
        self._most = MAX_DELTA_TOKENS // (1 + (params.logprobs or 0))
        self._weight = 1 + 3 * (params.logprobs or 0)
        self._text = text
        self._chain = chain
        self._parts: list[str] = []
        self._logprobs: list[Logprob] = []
        self._submitted_at = now
        self._queued_s: float | None = None
        self._first_token_at: float | None = None

    # ---- writing

    def resume(self, emitted: array[int]) -> bool:
        """Take back what an earlier broker had emitted and the reader holds; True where it ends in a stop string."""
        for token in emitted:
            self.sequence.append(token)
            text, _ = self._text.feed(token)
            self._parts.append(text)
            if self.params.logprobs is not None:
                self._logprobs.append(Logprob(token, 0.0, []))  # keeps its place; it is never sent
        self.sent = len(self._parts)
        return bool(self._text.stop)

    def start(self, queued_s: float) -> None:
        """The session left the queue after so many seconds."""
        self._queued_s = queued_s

    def append(self, event: Emitted, now: float) -> bool:
        """One more token; True where it completes a stop string, which ends the answer."""
        if self._first_token_at is None:
            self._first_token_at = now
        self.sequence.append(event.token)
        text, stopped = self._text.feed(event.token)
        self._parts.append(text)
        if event.logprobs is not None:
            self._logprobs.append(Logprob(event.token, event.logprobs.chosen, event.logprobs.top))
        return stopped

    def new_digests(self) -> bytes:
        """What its chain has gained since the last call; see ``Scheduler.extend``."""
        return self._chain.grow(self.sequence)

    def finish(self, event: Finished, exact: bool, now: float) -> Done:
        """The terminal message; what was held back for a stop string that did not come is text after all."""
        stopped = bool(self._text.stop) and event.reason is DoneReason.LENGTH  # by the very last token
        reason = DoneReason.STOP if stopped else event.reason
        tail = "" if self._text.stop else self._text.finish()
        if tail:
            self._parts.append(tail)
        self.ended_at = now
        self.done = Done(
            session_id=self.key.session_id,
            epoch=self.key.epoch,
            reason=reason,
            detail="stop string" if stopped else event.detail,
            stop=self._text.stop,
            usage=Usage(prompt_tokens=self.prompt_tokens, completion_tokens=self.emitted, cached_tokens=event.cached),
            timings=self._timings(now),
            exact=exact and reason in (DoneReason.STOP, DoneReason.LENGTH),
        )
        return self.done

    # ---- reading

    @property
    def emitted(self) -> int:
        """Tokens of the answer so far."""
        return len(self.sequence) - self.prompt_tokens

    @property
    def parts(self) -> int:
        """How many parts there are to be sent in all."""
        return len(self._parts)

    @property
    def unread(self) -> int:
        """Parts that the subscriber has not been sent."""
        return len(self._parts) - self.sent

    @property
    def has_news(self) -> bool:
        """Whether the subscriber lacks something."""
        return self.unread > 0 or (self.done is not None and not self.done_sent)

    def next_delta(self) -> tuple[Delta, int]:
        """What comes after the cursor, bounded, and where the cursor stands once it was sent."""
        sent, prompt = self.sent, self.prompt_tokens
        _, session_id, epoch = self.key
        end = min(len(self._parts), sent + self._most)
        delta = Delta(
            session_id=session_id,
            epoch=epoch,
            index=min(sent, self.emitted),
            tokens=pack_tokens(self.sequence[prompt + sent : prompt + end]),
            text="".join(self._parts[sent:end]),
            logprobs=self._logprobs[sent:end],
            recipe="" if sent else self.recipe,
        )
        return delta, end

    def items(self, delta: Delta) -> int:
        """How much a delta weighs in a frame: its tokens, and each alternative told with one."""
        return len(delta.tokens) // 4 * self._weight

    def decision(self) -> Decision:
        """The acceptance, as it was told at first."""
        assert self.admission is not None
        return Decision(
            admission=self.admission,
            seed=self.params.seed or 0,
            key=self.secret,
            prompt_tokens=self.prompt_tokens,
            max_tokens=self.max_tokens,
            recipe=self.recipe,
        )

    def _timings(self, now: float) -> SessionTimings:
        total = now - self._submitted_at
        first = self._first_token_at
        return SessionTimings(
            queued_s=total if self._queued_s is None else self._queued_s,
            ttft_s=None if first is None else first - self._submitted_at,
            total_s=total,
        )


def open_stream(
    key: SessionKey,
    secret: bytes,
    prompt: array[int],
    request: Request,
    params: SamplingParams,
    max_tokens: int,
    tokenizer: Tokenizer,
    chain: Chain,
    now: float,
) -> Stream:
    """A new session's empty log; ``chain`` has the prompt already."""
    stops: Sequence[str] = request.stop
    return Stream(key, secret, prompt, params, max_tokens, AnswerText(tokenizer, stops), chain, now)
