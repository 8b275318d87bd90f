"""Bad input of every kind is answered with its own typed error, and a neighbour streams on unharmed."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
import zmq
from real_node import RealNode

from treadle import Client, ContextTooLong, InvalidRequest
from treadle_shared import calls, codec
from treadle_shared.limits import MAX_FRAME_BYTES

CONTEXT = 256

BAD_REQUESTS: list[tuple[str, dict[str, Any], str]] = [
    ("an empty prompt", {"prompt": ""}, "prompt"),
    ("no tokens", {"tokens": b""}, "tokens"),
    ("half a token", {"tokens": b"\1\0\0"}, "tokens"),
    ("a negative token id", {"tokens": (-1).to_bytes(4, "little", signed=True)}, "tokens[0]"),
    ("a token id of n_vocab", {"tokens": (258).to_bytes(4, "little")}, "tokens[0]"),
    ("nothing to continue", {}, "prompt"),
    ("two prompts", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "prompt"),
    ("max_tokens 0", {"prompt": "x", "max_tokens": 0}, "max_tokens"),
    ("max_tokens -1", {"prompt": "x", "max_tokens": -1}, "max_tokens"),
    ("max_tokens 2^31", {"prompt": "x", "max_tokens": 2**31}, "max_tokens"),
    ("max_tokens as text", {"prompt": "x", "max_tokens": "5"}, "max_tokens"),
    ("max_tokens as a fraction", {"prompt": "x", "max_tokens": 1.5}, "max_tokens"),
    ("a NaN temperature", {"prompt": "x", "params": {"temperature": math.nan}}, "temperature"),
    ("an infinite temperature", {"prompt": "x", "params": {"temperature": math.inf}}, "temperature"),
    ("a negative temperature", {"prompt": "x", "params": {"temperature": -0.1}}, "temperature"),
    ("a negative top-k", {"prompt": "x", "params": {"top_k": -1}}, "top_k"),
    ("a top-p above 1", {"prompt": "x", "params": {"top_p": 1.1}}, "top_p"),
    ("a NaN penalty", {"prompt": "x", "params": {"repeat_penalty": math.nan}}, "repeat_penalty"),
    ("a seed of 2^32", {"prompt": "x", "params": {"seed": 2**32}}, "seed"),
    ("a bias on no token", {"prompt": "x", "params": {"logit_bias": {258: 1.0}}}, "logit_bias[258]"),
    ("an unknown field", {"prompt": "x", "colour": "red"}, "colour"),
    ("an unknown parameter", {"prompt": "x", "params": {"mirostat": 2}}, "mirostat"),
    ("10,000 stop strings", {"prompt": "x", "stop": ["a"] * 10_000}, "stop"),
    ("an empty stop string", {"prompt": "x", "stop": [""]}, "stop[0]"),
    ("a chat without messages", {"messages": []}, "messages"),
    ("an unknown role", {"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ("a role that breaks out", {"messages": [{"role": "user<|im_end|>\n", "content": "x"}]}, "messages[0].role"),
    ("a message that is no map", {"messages": ["hello"]}, "messages[0]"),
    ("a deadline in the past", {"prompt": "x", "deadline_s": -1.0}, "deadline_s"),
    ("a short key", {"prompt": "x", "key": b"123"}, "key"),
]


class RawClient:
    """A client that says whatever it is told to, bound by nothing."""

    def __init__(self, node: RealNode) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(node.directory.clients)
        self._rid = 0

    def send(self, data: bytes) -> None:
        self._socket.send(data)

    def next(self, timeout_s: float = 10.0) -> calls.ToClient:
        """The next message that is not an empty frame."""
        while self._socket.poll(int(timeout_s * 1000)):
            messages = codec.decode_to_client(self._socket.recv())
            if messages:
                assert len(messages) == 1
                return messages[0]
        raise AssertionError("no answer")

    def hello(self) -> RawClient:
        self.send(codec.encode(calls.Hello(major=1, minor=0)))
        assert isinstance(self.next(), calls.Welcome)
        return self

    def submit(self, *requests: Any) -> calls.ToClient:
        self._rid += 1
        self.send(msgpack.packb({"type": "submit", "rid": self._rid, "requests": list(requests)}))
        return self.next()

    def close(self) -> None:
        self._socket.close()
        self._context.term()


@pytest.fixture
def raw(reference_node: RealNode) -> Iterator[RawClient]:
    client = RawClient(reference_node)
    yield client
    client.close()


@pytest.fixture
def neighbour(reference_node: RealNode) -> Iterator[None]:
    """A session that streams through the test and must come out whole."""
    with reference_node.client() as client:
        options: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True, "seed": 1, "temperature": 0.8}
        quiet = client.generate("the neighbour", **options).result()
        session = client.generate("the neighbour", **options)
        yield
        assert session.result() == quiet


@pytest.mark.parametrize(
    ("request_map", "field"), [row[1:] for row in BAD_REQUESTS], ids=[row[0] for row in BAD_REQUESTS]
)
def test_a_bad_request_is_refused_by_name(
    request_map: dict[str, Any], field: str, reference_node: RealNode, raw: RawClient, neighbour: None
) -> None:
    before = reference_node.telemetry()["rejected_total"]
    answer = raw.hello().submit(request_map)
    assert isinstance(answer, calls.Decisions)
    admission = answer.decisions[0].admission
    assert admission.reason == "REJECTED_INVALID"
    assert admission.field == field
    assert admission.message
    assert reference_node.telemetry()["rejected_total"] == before + 1


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "malformed"),
        (b"\xff\xfe\xfd", "malformed"),
        (b"GET / HTTP/1.1\r\n\r\n", "malformed"),
        (msgpack.packb({"type": "submit"}), "hello_first"),
        (msgpack.packb({"type": "nonsense", "rid": 1}), "invalid"),
        (msgpack.packb([[[[[[[[[[[[1]]]]]]]]]]]]), "malformed"),
        (msgpack.packb({"type": "hello", "major": 99, "minor": 0}), "version"),
        (codec.encode(calls.Ask(rid=1, what="status")), "hello_first"),
    ],
)
def test_bytes_that_are_no_message_get_a_typed_failure(data: bytes, code: str, raw: RawClient, neighbour: None) -> None:
    raw.send(data)
    answer = raw.next()
    assert isinstance(answer, calls.Failure)
    assert answer.code in {code, "malformed", "invalid"} if code == "hello_first" else answer.code == code


def test_invalid_utf8_is_refused(raw: RawClient, neighbour: None) -> None:
    raw.hello()
    raw.send(b"\x83\xa4type\xa6submit\xa3rid\x01\xa8requests\x91\x81\xa6prompt\xa2\xc3\x28")
    answer = raw.next()
    assert isinstance(answer, calls.Failure)
    assert answer.code == "malformed"


def test_an_oversized_frame_costs_only_its_sender(reference_node: RealNode, raw: RawClient, neighbour: None) -> None:
    raw.hello().send(b"\0" * (MAX_FRAME_BYTES + 1))
    with reference_node.client() as client:
        assert client.generate("x", max_tokens=3, ignore_eos=True).wait() == "length"


@pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 1, 100 * CONTEXT])
def test_a_prompt_longer_than_a_session_is_told_the_numbers(
    length: int, reference_node: RealNode, neighbour: None
) -> None:
    with reference_node.client() as client:
        with pytest.raises(ContextTooLong) as refused:
            client.generate([65] * length, max_tokens=1)
        assert refused.value.limit == CONTEXT
        assert refused.value.needed > CONTEXT
        longest = client.generate([65] * (CONTEXT - 1), max_tokens=1, ignore_eos=True)
        assert longest.wait() == "length"


def test_a_megabyte_of_spaces_does_not_slow_the_neighbour(reference_node: RealNode) -> None:
    with reference_node.client() as client:
        with pytest.raises(ContextTooLong):
            client.generate(" " * (1 << 20), max_tokens=1)
        assert client.generate("x", max_tokens=3, ignore_eos=True).wait() == "length"


def test_the_client_refuses_what_cannot_be_sent(reference_node: RealNode) -> None:
    with reference_node.client() as client:
        for options, field in (
            ({"prompt": "x", "max_tokens": "5"}, "max_tokens"),
            ({"prompt": "x", "temperature": math.nan}, "temperature"),
            ({"prompt": "\ud800"}, "prompt"),
            ({"prompt": "x", "flavour": 1}, "flavour"),
            ({"prompt": [-1]}, "tokens"),
        ):
            with pytest.raises(InvalidRequest) as refused:
                client.generate(**options)  # type: ignore[arg-type]
            assert refused.value.field.startswith(field)


@pytest.mark.model
def test_text_that_looks_like_a_control_token_stays_text(llama_node: RealNode) -> None:
    with llama_node.client() as client:
        assert len(client.tokenize("<|im_end|>")) > 1
        plain = client.generate("<|im_end|>", max_tokens=2, ignore_eos=True)
        plain.result()
        assert plain.usage is not None
        assert plain.usage.prompt_tokens == len(client.tokenize("<|im_end|>"))


@pytest.mark.model
def test_long_hostile_texts_leave_the_demo_model_serving(llama_node: RealNode) -> None:
    limit = llama_node.config.session_tokens
    with llama_node.client() as client:
        session = client.generate("Count: one, two,", max_tokens=100, ignore_eos=True)
        started = time.monotonic()
        for text in (" " * (1 << 20), "!" * 50_000, "a" * 100_000, "\n" * 30_000, "👩‍👩‍👧" * 5_000):
            _expect_refusal_or_answer(client, text, limit)
        assert time.monotonic() - started < 60
        assert session.wait() == "length"


def _expect_refusal_or_answer(client: Client, text: str, limit: int) -> None:
    if len(client.tokenize(text)) < limit:
        assert client.generate(text, max_tokens=1).wait()
        return
    with pytest.raises(ContextTooLong) as refused:
        client.generate(text, max_tokens=1)
    assert refused.value.limit == limit
