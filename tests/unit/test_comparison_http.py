"""The parser of streamed HTTP answers, against bytes as llama-server and uvicorn send them."""

from __future__ import annotations

import json

import pytest
from comparison.http_response import MAX_HEAD, HttpResponse, MalformedResponseError

HEAD = (
    b"HTTP/1.1 200 OK\r\nKeep-Alive: timeout=5, max=100\r\nContent-Type: text/event-stream\r\nServer: llama.cpp\r\n"
    b"Transfer-Encoding: chunked\r\nAccess-Control-Allow-Origin: \r\n\r\n"
)
FIRST = b'data: {"index":0,"content":" the","tokens":[260],"stop":false,"id_slot":-1,"tokens_predicted":1}\n\n'
LAST = b'data: {"index":0,"content":"","tokens":[],"id_slot":0,"stop":true,"stop_type":"limit"}\n\n'
DONE = b"data: [DONE]\n\n"


def chunk(content: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(content), content)


ANSWER = HEAD + chunk(FIRST) + chunk(LAST + DONE) + b"0\r\n\r\n"
EVENTS = [FIRST[6:-2], LAST[6:-2], b"[DONE]"]


def test_a_chunked_stream_gives_its_events_and_ends_complete() -> None:
    response = HttpResponse()
    assert response.feed(ANSWER) == EVENTS
    assert response.status == 200
    assert response.complete
    assert json.loads(EVENTS[0])["tokens"] == [260]


@pytest.mark.parametrize("size", [1, 2, 7, 64, 300])
def test_how_the_bytes_are_cut_changes_nothing(size: int) -> None:
    response = HttpResponse()
    events = [event for at in range(0, len(ANSWER), size) for event in response.feed(ANSWER[at : at + size])]
    assert events == EVENTS
    assert response.complete


def test_an_event_in_two_chunks_is_given_when_it_is_whole() -> None:
    response = HttpResponse()
    assert response.feed(HEAD + chunk(FIRST[:20])) == []
    assert response.feed(chunk(FIRST[20:])) == EVENTS[:1]
    assert not response.complete


def test_carriage_returns_and_comments_belong_to_no_event() -> None:
    response = HttpResponse()
    text = b': ping\r\n\r\ndata: {"choices":[{"text":" a"}]}\r\n\r\n'
    assert response.feed(HEAD + chunk(text)) == [b'{"choices":[{"text":" a"}]}']


def test_a_carriage_return_cut_off_its_line_feed_still_ends_the_line() -> None:
    response = HttpResponse()
    response.feed(HEAD + chunk(b"data: 1\r\n\r"))
    assert response.feed(chunk(b"\ndata: 2\r\n\r\n")) == [b"1", b"2"]


def test_an_error_is_kept_as_body() -> None:
    body = b'{"error":{"code":503,"message":"Loading model","type":"unavailable_error"}}'
    head = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: %d\r\nContent-Type: application/json\r\n\r\n" % len(
        body
    )
    assert len(body) == 75
    response = HttpResponse()
    assert response.feed(head + body[:10]) == []
    assert not response.complete
    assert response.feed(body[10:]) == []
    assert response.complete
    assert (response.status, bytes(response.body)) == (503, body)


def test_a_stream_that_breaks_off_is_not_complete() -> None:
    response = HttpResponse()
    response.feed(ANSWER[:-5])
    assert not response.complete


@pytest.mark.parametrize(
    "data",
    [b"SSH-2.0-OpenSSH\r\n\r\n", b"x" * (MAX_HEAD + 1), HEAD + b"zz\r\nhello\r\n"],
    ids=["head", "flood", "chunk"],
)
def test_what_is_no_such_answer_is_an_error(data: bytes) -> None:
    with pytest.raises(MalformedResponseError):
        HttpResponse().feed(data)
