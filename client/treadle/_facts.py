"""What both kinds of session show of their stream."""

from __future__ import annotations

from treadle._stream import Stream
from treadle.events import Done, TokenLogprob
from treadle_shared.admission import AdmissionDecision
from treadle_shared.calls import Decision, SessionTimings, Usage


class SessionFacts:
    """One accepted session, as far as it has come. Every property is what is known now; none waits."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def __repr__(self) -> str:
        state = self.finish_reason or ("broken" if self._stream.error else "running")
        return f"<{type(self).__name__} {self.session_id!r} epoch {self.epoch}: {state}, {len(self.tokens)} tokens>"

    @property
    def session_id(self) -> str:
        """The session's id, chosen by the caller or the node."""
        return self.admission.session_id

    @property
    def epoch(self) -> int:
        """Which use of the id this is."""
        return self.admission.epoch

    @property
    def admission(self) -> AdmissionDecision:
        """The node's answer to the submission: ADMITTED or QUEUED, with the queue position."""
        return self._decision.admission

    @property
    def seed(self) -> int:
        """The seed of every draw; sending it again with the same request repeats the tokens."""
        return self._decision.seed

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt in tokens."""
        return self._decision.prompt_tokens

    @property
    def max_tokens(self) -> int:
        """The most tokens the answer may have."""
        return self._decision.max_tokens

    @property
    def text(self) -> str:
        """The answer so far; all of it once ``finish_reason`` is set."""
        return "".join(self._stream.texts)

    @property
    def tokens(self) -> list[int]:
        """Token ids of the answer so far."""
        return self._stream.tokens.tolist()

    @property
    def logprobs(self) -> list[TokenLogprob]:
        """One entry for each token so far, where ``logprobs`` was asked for."""
        return list(self._stream.logprobs)

    @property
    def ended(self) -> bool:
        """Whether nothing more will come: it finished, or the node went away."""
        return self._stream.ended

    @property
    def finish_reason(self) -> str | None:
        """``stop``, ``length``, ``cancelled``, ``deadline``, ``cache_miss`` or ``failed``; None until the end."""
        return self._done.finish_reason if self._done else None

    @property
    def stop(self) -> str | None:
        """The stop string that ended the answer, if one did."""
        return (self._done.stop or None) if self._done else None

    @property
    def exact(self) -> bool | None:
        """Whether the tokens depend on recipe, prompt, parameters and seed alone; None until the end."""
        return self._done.exact if self._done else None

    @property
    def usage(self) -> Usage | None:
        """Tokens of prompt and answer, and how many prompt tokens came from a cache; None until the end."""
        return self._done.usage if self._done else None

    @property
    def timings(self) -> SessionTimings | None:
        """Seconds in the queue, to the first token and in all, measured in the node; None until the end."""
        return self._done.timings if self._done else None

    @property
    def _decision(self) -> Decision:
        decision = self._stream.decision
        assert decision is not None, "sessions are made of accepted streams"
        return decision

    @property
    def _done(self) -> Done | None:
        return self._stream.done
