"""From a client's request to a job: tokens, bounds and parameters."""

from __future__ import annotations

import secrets
from array import array
from dataclasses import dataclass

import msgspec

from treadle_broker.prefix_hash import Chain, PrefixHasher, PrefixSharing
from treadle_broker.session import Job
from treadle_broker.text import ChatTemplate, Tokenizer
from treadle_shared.admission import AdmissionDecision, AdmissionReason
from treadle_shared.calls import Request
from treadle_shared.config import NodeConfig
from treadle_shared.errors import InvalidRequest, MalformedMessage
from treadle_shared.sampling import SEED_LIMIT, SamplingParams
from treadle_shared.tokens import unpack_tokens

RESUMED_PRIORITY = 1000  # above every priority that a request may ask for
INLINE_TEXT_BYTES = 16 << 10  # longer texts are tokenised beside the loop: a millisecond here is everyone's


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A request that can be submitted: its prompt's token ids, its bounds, its sampler with a seed. ``prefix`` are the
    digests that ``chain`` has of the prompt; what was emitted before comes after it.
    """

    request: Request
    session_id: str
    secret: bytes
    prompt: array[int]
    max_tokens: int
    params: SamplingParams
    emitted: array[int]
    chain: Chain
    prefix: bytes

    def job(self, client: str, now: float, resuming: bool) -> Job:
        """What the scheduler needs to know. ``resuming``: sessions of an earlier broker are taken back first."""
        request = self.request
        resumed = resuming and request.emitted is not None
        return Job(
            client=client,
            session_id=self.session_id,
            prompt_tokens=len(self.prompt),
            max_new_tokens=self.max_tokens,
            priority=RESUMED_PRIORITY if resumed else request.priority,
            queue_deadline=None if request.queue_timeout_s is None else now + request.queue_timeout_s,
            deadline=None if request.deadline_s is None else now + request.deadline_s,
            emitted=len(self.emitted),
            resumed=resumed,
            recipe=request.recipe if len(self.emitted) else "",
            prefix=self.prefix,
            watched=bool(request.stop),
        )


class Intake:
    """Tokenises prompts and fills in what a request leaves open. ``sharing``: see PrefixHasher.

    ``prepare`` may run beside the loop: it touches nothing but the tokenizer and the template.
    """

    def __init__(
        self, config: NodeConfig, tokenizer: Tokenizer, template: ChatTemplate, sharing: PrefixSharing = "client"
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._template = template
        self._hasher = PrefixHasher(sharing if config.effective_cache_slots else "off")

    def text_bytes(self, request: Request) -> int:
        """Bytes of text that would have to be tokenised (at least: characters, where that is cheaper to tell)."""
        texts = [message.content for message in request.messages or ()]
        return sum(map(len, texts)) + len(request.prompt or "")

    def too_long(self, request: Request, context_tokens: int) -> AdmissionDecision | None:
        """The refusal of a prompt that cannot fit whatever its tokens are, found without looking at one."""
        least = max(-(-self.text_bytes(request) // self._tokenizer.max_piece_bytes), len(request.tokens or b"") // 4)
        if least <= context_tokens:
            return None
        return AdmissionDecision(
            reason=AdmissionReason.REJECTED_CONTEXT,
            session_id=request.session_id,
            budget="context_tokens",
            needed=least,
            available=context_tokens,
            limit=context_tokens,
            field=next(name for name in ("messages", "tokens", "prompt") if getattr(request, name)),
            message=f"the prompt has at least {least} tokens, a session holds {context_tokens}",
        )

    def prepare(self, request: Request, client: str) -> Prepared:
        """``client`` is whose request it is. Raises InvalidRequest naming the field."""
        prompt = self._prompt(request)
        self._check_bias(request.params)
        max_tokens = request.max_tokens or self._default_max_tokens(len(prompt))
        chain = self._hasher.chain(client, request.cache_salt)
        return Prepared(
            request=request,
            session_id=request.session_id or secrets.token_hex(8),
            secret=request.key or secrets.token_bytes(16),
            prompt=prompt,
            max_tokens=max_tokens,
            params=_seeded(request.params),
            emitted=self._emitted(request, max_tokens),
            chain=chain,
            prefix=chain.grow(prompt),
        )

    def tokenize(self, text: str) -> array[int]:
        """Token ids as a prompt of this text would have."""
        return self._tokenizer.encode(text, "text")

    def _prompt(self, request: Request) -> array[int]:
        given = [name for name in ("prompt", "tokens", "messages") if getattr(request, name) is not None]
        if len(given) != 1:
            raise InvalidRequest("prompt", "exactly one of prompt, tokens and messages must be given")
        if request.messages is not None:
            return self._template.encode_chat(request.messages)
        if request.tokens is not None:
            return self._token_ids(request.tokens, "tokens")
        assert request.prompt is not None
        if not request.prompt:
            raise InvalidRequest("prompt", "must not be empty")
        return self._tokenizer.encode(request.prompt, "prompt")

    def _emitted(self, request: Request, max_tokens: int) -> array[int]:
        """What a resumed session had emitted."""
        if request.emitted is None:
            return array("i")
        if request.key is None or request.params.seed is None:
            raise InvalidRequest("emitted", "a session is resumed with the key and the seed of its acceptance")
        tokens = self._token_ids(request.emitted, "emitted") if request.emitted else array("i")
        if len(tokens) > max_tokens:
            raise InvalidRequest("emitted", f"{len(tokens)} tokens are more than max_tokens ({max_tokens})")
        return tokens

    def _token_ids(self, data: bytes, field: str) -> array[int]:
        try:
            tokens = unpack_tokens(data)
        except MalformedMessage as error:
            raise InvalidRequest(field, error.problem) from None
        if not tokens:
            raise InvalidRequest(field, "must hold at least one token")
        n_vocab = self._tokenizer.n_vocab
        for index, token in enumerate(tokens):
            if not 0 <= token < n_vocab:
                raise InvalidRequest(f"{field}[{index}]", f"{token} is not a token id: the vocabulary has {n_vocab}")
        return tokens

    def _check_bias(self, params: SamplingParams) -> None:
        for token in params.logit_bias:
            if token >= self._tokenizer.n_vocab:
                raise InvalidRequest(
                    f"logit_bias[{token}]", f"is not a token id: the vocabulary has {self._tokenizer.n_vocab}"
                )

    def _default_max_tokens(self, prompt_tokens: int) -> int:
        room = self._config.session_tokens - prompt_tokens
        return max(1, min(self._config.effective_max_tokens, room))


def _seeded(params: SamplingParams) -> SamplingParams:
    if params.seed is not None:
        return params
    return msgspec.structs.replace(params, seed=secrets.randbelow(SEED_LIMIT - 1))


def invalid(session_id: str, error: InvalidRequest) -> AdmissionDecision:
    """The refusal that a bad field of a request comes to."""
    return AdmissionDecision(
        reason=AdmissionReason.REJECTED_INVALID,
        session_id=session_id,
        field=error.field[:128],
        message=error.problem[:512],
    )
