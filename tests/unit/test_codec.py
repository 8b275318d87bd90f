"""The codec: golden bytes, bounds, and nothing but typed errors for anything else."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgpack
import msgspec
import pytest
import wire_samples
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle_shared import calls, codec, limits, ticks
from treadle_shared.engine import TokenLogprobs
from treadle_shared.errors import InvalidRequest, MalformedMessage
from treadle_shared.tokens import pack_tokens, unpack_tokens

DECODERS: dict[str, Callable[[bytes], Any]] = {
    "client to broker": codec.decode_from_client,
    "broker to client": codec.decode_to_client,
    "broker to worker": codec.decode_to_worker,
    "worker to broker": codec.decode_from_worker,
}
SAMPLES = [
    pytest.param(direction, message, id=wire_samples.tag_of(type(message)))
    for direction, (messages, _) in wire_samples.DIRECTIONS.items()
    for message in messages
]
SUBMIT = {"type": "submit", "rid": 1, "requests": [{"prompt": "x"}]}


def decode(direction: str, data: bytes) -> msgspec.Struct:
    """The one message in ``data``; the broker sends a client lists."""
    if direction == "broker to client":
        (message,) = DECODERS[direction](data)
        return message
    return DECODERS[direction](data)


def encode(direction: str, message: msgspec.Struct) -> bytes:
    return codec.encode([message] if direction == "broker to client" else message)


def from_client(value: Any) -> calls.FromClient:
    return codec.decode_from_client(msgpack.packb(value))


def submit(**request: Any) -> dict[str, Any]:
    return SUBMIT | {"requests": [request]}


# ---- golden bytes


def test_every_message_type_has_a_sample_and_golden_bytes() -> None:
    tags = [wire_samples.tag_of(message_type) for message_type in wire_samples.message_types()]
    assert len(set(tags)) == len(tags)
    assert set(wire_samples.samples()) == set(wire_samples.golden()) == set(tags)


@pytest.mark.parametrize("message_type", wire_samples.message_types(), ids=lambda t: t.__name__)
def test_samples_set_every_field(message_type: type[msgspec.Struct]) -> None:
    sample = wire_samples.samples()[wire_samples.tag_of(message_type)]
    for field in msgspec.structs.fields(message_type):
        assert getattr(sample, field.name) != field.default, f"{field.name} has its default"


@pytest.mark.parametrize(("direction", "message"), SAMPLES)
def test_messages_are_encoded_to_their_golden_bytes(direction: str, message: msgspec.Struct) -> None:
    assert codec.encode(message) == wire_samples.golden()[wire_samples.tag_of(type(message))]


@pytest.mark.parametrize(("direction", "message"), SAMPLES)
def test_messages_come_back_as_they_were(direction: str, message: msgspec.Struct) -> None:
    assert decode(direction, encode(direction, message)) == message


def test_a_frame_of_several_messages_keeps_their_order() -> None:
    assert codec.decode_to_client(codec.encode(list(wire_samples.TO_CLIENT))) == wire_samples.TO_CLIENT


@pytest.mark.parametrize(("direction", "message"), SAMPLES)
def test_messages_travel_in_their_own_direction_only(direction: str, message: msgspec.Struct) -> None:
    for other in DECODERS:
        if other != direction:
            with pytest.raises(MalformedMessage):
                decode(other, encode(other, message))


# ---- what is refused


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ({"type": "nonsense"}, "type"),
        ({"rid": 1}, ""),
        ([], ""),
        (None, ""),
        ("hello", ""),
        ({"type": "hello", "major": 1}, ""),
        ({"type": "hello", "major": 1, "minor": 0, "extra": 1}, "extra"),
        ({"type": "hello", "major": "1", "minor": 0}, "major"),
        ({"type": "hello", "major": True, "minor": 0}, "major"),
        ({"type": "hello", "major": 1.5, "minor": 0}, "major"),
        ({"type": "hello", "major": -1, "minor": 0}, "major"),
        ({"type": "hello", "major": 1 << 53, "minor": 0}, "major"),
        ({"type": "hello", "major": 1, "minor": 0, "client": "x" * 129}, "client"),
        ({"type": "submit", "rid": 1, "requests": []}, "requests"),
        ({"type": "submit", "rid": 1, "requests": [{}] * 257}, "requests"),
        (submit(prompt=5), "requests[0].prompt"),
        (submit(prompt=b"bytes"), "requests[0].prompt"),
        (submit(prompt="x" * (limits.MAX_TEXT_BYTES + 1)), "requests[0].prompt"),
        (submit(tokens=bytes(limits.MAX_TOKENS_BYTES + 4)), "requests[0].tokens"),
        (submit(tokens=[1, 2]), "requests[0].tokens"),
        (submit(messages=[{"role": "user", "content": "x"}] * 257), "requests[0].messages"),
        (submit(messages=[{"role": "user"}]), "requests[0].messages[0]"),
        (submit(messages=[{"role": "u" * 33, "content": ""}]), "requests[0].messages[0].role"),
        (submit(max_tokens=0), "requests[0].max_tokens"),
        (submit(max_tokens=-1), "requests[0].max_tokens"),
        (submit(max_tokens=1 << 31), "requests[0].max_tokens"),
        (submit(max_tokens="5"), "requests[0].max_tokens"),
        (submit(max_tokens=None, nonsense=1), "requests[0].nonsense"),
        (submit(stop=[""]), "requests[0].stop[0]"),
        (submit(stop=["x" * 257]), "requests[0].stop[0]"),
        (submit(stop=["x"] * 17), "requests[0].stop"),
        (submit(session_id="x" * 129), "requests[0].session_id"),
        (submit(key=b"short"), "requests[0].key"),
        (submit(key=bytes(17)), "requests[0].key"),
        (submit(priority=101), "requests[0].priority"),
        (submit(deadline_s=0.0), "requests[0].deadline_s"),
        (submit(deadline_s=float("nan")), "requests[0].deadline_s"),
        (submit(queue_timeout_s=float("inf")), "requests[0].queue_timeout_s"),
        (submit(params={"top_k": -1}), "requests[0].params.top_k"),
        (submit(params={"nonsense": 1}), "requests[0].params.nonsense"),
        (submit(params={"seed": (1 << 32) - 1}), "requests[0].params.seed"),
        (submit(params={"logprobs": 21}), "requests[0].params.logprobs"),
        (submit(params={"penalty_last_n": 5000}), "requests[0].params.penalty_last_n"),
        (submit(params={"logit_bias": dict.fromkeys(range(1025), 0.0)}), "requests[0].params.logit_bias"),
        ({"type": "cancel", "rid": 1, "session_id": ""}, "session_id"),
        ({"type": "tokenize", "rid": -1, "text": "x"}, "rid"),
        ({"type": "drain", "rid": 1, "timeout_s": 2e6}, "timeout_s"),
    ],
)
def test_a_field_out_of_its_bounds_is_refused_by_name(value: Any, field: str) -> None:
    with pytest.raises(MalformedMessage) as caught:
        from_client(value)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"temperature": -0.5}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"repeat_penalty": 0.0}, "repeat_penalty"),
        ({"presence_penalty": 101.0}, "presence_penalty"),
        ({"frequency_penalty": float("-inf")}, "frequency_penalty"),
        ({"logit_bias": {5: float("nan")}}, "logit_bias[5]"),
    ],
)
def test_a_sampling_value_that_cannot_be_served_is_the_requests_fault(params: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        from_client(submit(params=params))
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"release": [256]}, "release[0]"),
        ({"release": [*range(256), 0]}, "release"),
        ({"decode": [[0, 1]]}, "decode[0]"),
        ({"decode": [[-1, 1, 1]]}, "decode[0][0]"),
        ({"decode": [[0, 1, 1, -2]]}, "decode[0][3]"),
        ({"decode": [[0, 1, 1, -1, True, 0]]}, "decode[0]"),
        ({"decode": [[0, 1, 1]] * 257}, "decode"),
        ({"prefill": [[0, 1, 0, b"", 1]]}, "prefill[0][4]"),
        ({"prefill": [[0, 1, 0, "text", True]]}, "prefill[0][3]"),
        ({"tick_id": -1}, "tick_id"),
        ({"park": [[0]]}, "park[0]"),
        ({"park": [[256, 1]]}, "park[0][0]"),
        ({"restore": [[0, 1]]}, "restore[0]"),
        ({"discard": [-1]}, "discard[0]"),
        ({"extra": []}, "extra"),
    ],
)
def test_a_tick_out_of_its_bounds_is_refused_by_name(change: dict[str, Any], field: str) -> None:
    tick = {"type": "tick", "broker_id": "b", "worker_id": "w", "tick_id": 1} | change
    with pytest.raises(MalformedMessage) as caught:
        codec.decode_to_worker(msgpack.packb(tick))
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"rows": [[0, 1, 1]] * 513}, "rows"),
        ({"rows": [[0, 1, 1 << 31]]}, "rows[0][2]"),
        ({"skipped": [[0, 1, 2]]}, "skipped[0]"),
        ({"part": 2}, "part"),
        ({"error": "x" * 513}, "error"),
        ({"timings": [-1.0, 0.0, 0.0]}, "timings[0]"),
        ({"kv_tokens": -1}, "kv_tokens"),
    ],
)
def test_a_result_out_of_its_bounds_is_refused_by_name(change: dict[str, Any], field: str) -> None:
    result = {"type": "result", "broker_id": "b", "worker_id": "w", "tick_id": 1} | change
    with pytest.raises(MalformedMessage) as caught:
        codec.decode_from_worker(msgpack.packb(result))
    assert caught.value.field == field


@pytest.mark.parametrize(("direction", "message"), SAMPLES)
def test_a_truncated_message_is_refused(direction: str, message: msgspec.Struct) -> None:
    data = encode(direction, message)
    for end in range(len(data)):
        with pytest.raises(MalformedMessage):
            decode(direction, data[:end])


@pytest.mark.parametrize("direction", DECODERS)
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\xa1\xff",
        msgpack.packb({"type": "goodbye"}) * 2,
        msgpack.packb(msgpack.ExtType(5, b"x")),
        msgpack.packb(msgpack.Timestamp(1)),
        b"\x81" * 100 + b"\xc0" * 200,
        b"\x91" * 2000 + b"\xc0",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        msgpack.packb([0] * 8193),
        msgpack.packb({n: n for n in range(8193)}),
    ],
    ids=[
        "nothing",
        "reserved byte",
        "not UTF-8",
        "two messages",
        "extension",
        "timestamp",
        "maps as keys",
        "deep",
        "array length",
        "map length",
        "binary length",
        "text length",
        "long array",
        "long map",
    ],
)
def test_what_is_not_a_message_is_refused(direction: str, data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        DECODERS[direction](data)


def test_nesting_beyond_the_bound_is_refused() -> None:
    value: Any = 0
    for _ in range(limits.MAX_DEPTH + 2):
        value = [value]
    with pytest.raises(MalformedMessage, match="nested"):
        codec.unpack(msgpack.packb(value))


@pytest.mark.parametrize("direction", DECODERS)
def test_an_oversized_frame_is_refused_before_it_is_read(direction: str) -> None:
    with pytest.raises(MalformedMessage, match="over the limit"):
        DECODERS[direction](bytes(limits.MAX_FRAME_BYTES + 1))


def test_a_frame_of_too_many_messages_is_refused() -> None:
    position = calls.Position(session_id="s", epoch=0, ahead=0)
    assert len(codec.decode_to_client(codec.encode([position] * limits.MAX_EVENTS))) == limits.MAX_EVENTS
    with pytest.raises(MalformedMessage, match="messages"):
        codec.decode_to_client(codec.encode([position] * (limits.MAX_EVENTS + 1)))


# ---- what must still pass


def test_the_largest_real_messages_pass() -> None:
    top = [(49_151, -1.25)] * 20
    many = calls.Submit(
        rid=1,
        requests=[
            calls.Request(messages=[calls.ChatMessage(role="user", content="x")] * 256, stop=["x" * 16] * 16)
            for _ in range(limits.MAX_REQUESTS)
        ],
    )
    result = ticks.TickResult(
        broker_id="b",
        worker_id="w",
        tick_id=1,
        rows=[ticks.ResultRow(n % 256, 1, 1, logprobs=TokenLogprobs(-0.5, top)) for n in range(512)],
        skipped=[(n, 1) for n in range(256)],
    )
    tick = ticks.Tick(
        broker_id="b",
        worker_id="w",
        tick_id=1,
        release=list(range(256)),
        decode=[ticks.DecodeRow(n, 1, 1) for n in range(256)],
        prefill=[ticks.PrefillRow(n, 1, 0, bytes(4096), True, 0, wire_samples.PARAMS) for n in range(256)],
    )
    delta = calls.Delta(
        session_id="s", epoch=0, index=0, tokens=bytes(4096), text="x", logprobs=[calls.Logprob(1, -0.5, top)] * 1024
    )
    assert codec.decode_from_client(codec.encode(many)) == many
    assert codec.decode_from_worker(codec.encode(result)) == result
    assert codec.decode_to_worker(codec.encode(tick)) == tick
    assert codec.decode_to_client(codec.encode([delta, delta])) == [delta, delta]


@settings(deadline=None)
@given(st.lists(st.integers(min_value=-(1 << 31), max_value=(1 << 31) - 1)))
def test_token_arrays_come_back_as_they_were(tokens: list[int]) -> None:
    assert list(unpack_tokens(pack_tokens(tokens))) == tokens


def test_token_arrays_are_little_endian_int32() -> None:
    assert pack_tokens([1, -1, 0x01020304]) == bytes.fromhex("01000000ffffffff04030201")
    with pytest.raises(MalformedMessage, match="int32"):
        unpack_tokens(b"\x01\x02\x03")


# ---- anything at all

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text() | st.integers(), inner, max_size=4),
    max_leaves=12,
)


def assert_only_typed_errors(data: bytes) -> None:
    for decoder in DECODERS.values():
        try:
            decoder(data)
        except (MalformedMessage, InvalidRequest):
            continue


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=256))
def test_random_bytes_raise_nothing_but_typed_errors(data: bytes) -> None:
    assert_only_typed_errors(data)


@settings(max_examples=500, deadline=None)
@given(VALUES)
def test_random_values_raise_nothing_but_typed_errors(value: Any) -> None:
    try:
        data = msgpack.packb(value)
    except (ValueError, OverflowError):  # lone surrogates
        return
    assert_only_typed_errors(data)


@settings(max_examples=500, deadline=None)
@given(st.sampled_from(sorted(wire_samples.golden())), st.data())
def test_damaged_messages_raise_nothing_but_typed_errors(tag: str, data: st.DataObject) -> None:
    frame = bytearray(wire_samples.golden()[tag])
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    assert_only_typed_errors(bytes(frame))
    assert_only_typed_errors(b"\x91" + bytes(frame))


@settings(max_examples=500, deadline=None)
@given(st.sampled_from(sorted(wire_samples.golden())), st.data())
def test_messages_with_a_foreign_value_raise_nothing_but_typed_errors(tag: str, data: st.DataObject) -> None:
    message = msgpack.unpackb(wire_samples.golden()[tag], strict_map_key=False)
    message[data.draw(st.sampled_from(sorted(message)))] = data.draw(VALUES)
    try:
        frame = msgpack.packb(message)
    except (ValueError, OverflowError):
        return
    assert_only_typed_errors(frame)
    assert_only_typed_errors(b"\x91" + frame)


# ---- memory


@contextmanager
def peak_below(limit: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < limit, f"{peak >> 20} MiB"


def nested(item: bytes, each: int) -> bytes:
    """A frame of nearly the largest size, full of arrays of ``item``."""
    inner = b"\xdc" + each.to_bytes(2, "big") + item * each
    count = (limits.MAX_FRAME_BYTES - 8) // len(inner)
    return b"\xdd" + count.to_bytes(4, "big") + inner * count


@pytest.mark.parametrize(
    "item", [b"\x90", b"\x80", b"\x01", b"\x81\x01\x01", b"\xa1a", b"\xc4\x01a"], ids=lambda item: item.hex()
)
def test_a_hostile_frame_costs_bounded_memory(item: bytes) -> None:
    """A byte can stand for 64 in memory; without a bound these frames take up to 300 MB."""
    frame = nested(item, 8000)
    with peak_below(128 << 20), pytest.raises(MalformedMessage):
        codec.decode_from_client(frame)


def test_a_claimed_length_allocates_nothing() -> None:
    with peak_below(1 << 20):
        for head in (b"\xdd", b"\xdf", b"\xc6", b"\xdb"):
            with pytest.raises(MalformedMessage):
                codec.decode_from_client(head + b"\xff\xff\xff\xff" + b"x" * 64)
