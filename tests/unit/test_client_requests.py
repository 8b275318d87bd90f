"""Keyword arguments to requests: a wrong value is refused by its name before anything is sent."""

from __future__ import annotations

import math
from array import array
from typing import Any

import pytest

from treadle._request import build_request, build_requests
from treadle_shared.calls import ChatMessage, Request
from treadle_shared.errors import InvalidRequest
from treadle_shared.limits import MAX_REQUESTS, MAX_TEXT_BYTES
from treadle_shared.sampling import SamplingParams
from treadle_shared.tokens import unpack_tokens


def test_flat_keywords_land_where_they_belong() -> None:
    request = build_request({"prompt": "x", "max_tokens": 5, "temperature": 1, "stop": ["a", "b"], "priority": -3})
    assert request.prompt == "x"
    assert (request.max_tokens, request.priority, request.stop) == (5, -3, ["a", "b"])
    assert request.params == SamplingParams(temperature=1.0)


def test_every_sampling_parameter_is_a_keyword() -> None:
    given = {"temperature": 0.5, "seed": 3, "logit_bias": {7: -1.0}, "logprobs": 2, "ignore_eos": True}
    assert build_request({"prompt": "x", **given}).params == SamplingParams(**given)  # type: ignore[arg-type]
    for name in SamplingParams.__struct_fields__:
        build_request({"prompt": "x", name: getattr(SamplingParams(), name)})


def test_each_request_has_its_own_secret() -> None:
    first, second = build_requests([{"prompt": "x"}, {"prompt": "x"}])
    assert first.key is not None
    assert len(first.key) == 16
    assert first.key != second.key


def test_one_stop_string_may_be_given_as_text() -> None:
    assert build_request({"prompt": "x", "stop": "END"}).stop == ["END"]


@pytest.mark.parametrize("prompt", [[1, 2], (1, 2), array("i", [1, 2]), range(1, 3)])
def test_token_ids_come_from_any_sequence_of_integers(prompt: Any) -> None:
    request = build_request({"prompt": prompt})
    assert request.prompt is None
    assert unpack_tokens(request.tokens or b"").tolist() == [1, 2]


def test_messages_may_be_mappings_or_message_objects() -> None:
    message = ChatMessage(role="user", content="hi")
    assert build_request({"messages": [message, {"role": "user", "content": "hi"}]}).messages == [message, message]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": b"bytes"}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"prompt": "é" * MAX_TEXT_BYTES}, "prompt"),
        ({"prompt": [0, -1]}, "tokens"),
        ({"prompt": [2**31]}, "tokens"),
        ({"prompt": [True]}, "tokens"),
        ({"prompt": [1.0]}, "tokens"),
        ({"prompt": "x", "messages": []}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": 3}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0]"),
        ({"messages": [{"role": "", "content": ""}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "\udc00"}]}, "messages[0].content"),
        ({"prompt": "x", "colour": 1}, "colour"),
        ({"prompt": "x", "tokens": b""}, "tokens"),
        ({"prompt": "x", "key": b"k" * 16}, "key"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "x", "max_tokens": -1}, "max_tokens"),
        ({"prompt": "x", "max_tokens": 2**31}, "max_tokens"),
        ({"prompt": "x", "max_tokens": "5"}, "max_tokens"),
        ({"prompt": "x", "max_tokens": 5.0}, "max_tokens"),
        ({"prompt": "x", "max_tokens": True}, "max_tokens"),
        ({"prompt": "x", "temperature": math.nan}, "temperature"),
        ({"prompt": "x", "temperature": math.inf}, "temperature"),
        ({"prompt": "x", "temperature": "hot"}, "temperature"),
        ({"prompt": "x", "temperature": None}, "temperature"),
        ({"prompt": "x", "top_k": -1}, "top_k"),
        ({"prompt": "x", "seed": object()}, "seed"),
        ({"prompt": "x", "logit_bias": {-1: 1.0}}, "logit_bias"),
        ({"prompt": "x", "stop": ["x"] * 10_000}, "stop"),
        ({"prompt": "x", "stop": [""]}, "stop[0]"),
        ({"prompt": "x", "stop": ["\ud83d"]}, "stop[0]"),
        ({"prompt": "x", "session_id": "\udfff"}, "session_id"),
        ({"prompt": "x", "session_id": "i" * 200}, "session_id"),
        ({"prompt": "x", "deadline_s": math.nan}, "deadline_s"),
        ({"prompt": "x", "deadline_s": 0}, "deadline_s"),
        ({"prompt": "x", "priority": 101}, "priority"),
    ],
)
def test_a_wrong_value_is_named(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        build_request(fields)
    assert refused.value.field == field


def test_a_request_of_many_is_named_by_its_place() -> None:
    with pytest.raises(InvalidRequest) as refused:
        build_requests([{"prompt": "x"}, {"prompt": "x", "top_k": -1}])
    assert refused.value.field == "requests[1].top_k"


def test_a_request_object_built_by_hand_is_checked_like_any_other() -> None:
    (request,) = build_requests([Request(prompt="x")])
    assert request.key is not None
    kept = Request(prompt="x", key=b"k" * 16)
    assert build_requests([kept]) == [kept]
    for wrong in (
        Request(prompt=""),
        Request(),
        Request(prompt="x", max_tokens=-1),
        Request(prompt="x", tokens=b"1234"),
    ):
        with pytest.raises(InvalidRequest):
            build_requests([wrong])


@pytest.mark.parametrize("items", [[], ["text"], [None]])
def test_what_is_no_list_of_requests_is_refused(items: Any) -> None:
    with pytest.raises(InvalidRequest, match="requests"):
        build_requests(items)


def test_one_submission_has_a_bound() -> None:
    assert len(build_requests([{"prompt": "x"}] * MAX_REQUESTS)) == MAX_REQUESTS
    with pytest.raises(InvalidRequest, match="more than"):
        build_requests({"prompt": "x"} for _ in range(10**9))
