"""The client's protocol core: bytes in, bytes out, without a socket."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle._call import Call
from treadle._core import Core, State
from treadle._request import build_request
from treadle._stream import Stream
from treadle.errors import (
    Cancelled,
    ClientClosed,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    SessionFailed,
    Unavailable,
    VersionMismatch,
)
from treadle.events import Done, QueuePosition, Recovering, Started, TextDelta
from treadle_shared import AdmissionDecision, AdmissionReason, DoneReason, calls, codec
from treadle_shared.errors import MalformedMessage
from treadle_shared.tokens import pack_tokens

USAGE = calls.Usage(prompt_tokens=1, completion_tokens=2)
TIMINGS = calls.SessionTimings(queued_s=0.0, ttft_s=0.1, total_s=0.2)


def sent(core: Core) -> list[calls.FromClient]:
    """Everything the core wants to send, taken."""
    messages = []
    while (frame := core.next_frame()) is not None:
        messages.append(codec.decode_from_client(frame))
        core.sent()
    return messages


def tell(core: Core, *messages: calls.ToClient) -> None:
    core.receive(codec.encode(list(messages)))
    core.check()


def open_core() -> Core:
    core = Core("test")
    core.connect()
    sent(core)
    tell(core, calls.Welcome(major=1, minor=0, boot_id="b"))
    return core


def accepted(session_id: str = "s", epoch: int = 1, **fields: Any) -> calls.Decision:
    admission = AdmissionDecision(reason=AdmissionReason.ADMITTED, session_id=session_id, epoch=epoch, **fields)
    return calls.Decision(admission=admission, seed=5, key=b"k" * 16, prompt_tokens=1, max_tokens=9)


def refused(reason: AdmissionReason = AdmissionReason.REJECTED_QUEUE_FULL) -> calls.Decision:
    return calls.Decision(admission=AdmissionDecision(reason=reason, session_id="s", retry_after_s=1.5))


def delta(index: int, *tokens: int, text: str = "", **names: Any) -> calls.Delta:
    where = {"session_id": "s", "epoch": 1} | names
    return calls.Delta(**where, index=index, tokens=pack_tokens(tokens), text=text)


def done(reason: DoneReason = DoneReason.STOP, detail: str = "") -> calls.Done:
    return calls.Done(session_id="s", epoch=1, reason=reason, detail=detail, usage=USAGE, timings=TIMINGS)


def submitted(core: Core, *prompts: str) -> Call:
    return core.submit([build_request({"prompt": prompt}) for prompt in prompts or ("x",)])


def running(core: Core) -> Stream:
    """A session that was accepted, nothing of its submission left to send."""
    call = submitted(core)
    sent(core)
    tell(core, calls.Decisions(rid=call.rid, decisions=[accepted()]))
    return call.streams[0]


def test_hello_goes_first_and_nothing_is_asked_before_the_welcome() -> None:
    core = Core("me")
    core.connect()
    with pytest.raises(Unavailable):
        submitted(core)
    assert sent(core) == [calls.Hello(major=1, minor=0, client="me")]
    tell(core, calls.Welcome(major=1, minor=0, boot_id="boot"))
    assert (core.state, core.boot_id) == (State.OPEN, "boot")
    call = submitted(core)
    (message,) = sent(core)
    assert isinstance(message, calls.Submit)
    assert message.rid == call.rid


def test_a_session_collects_its_events_text_and_tokens_in_order() -> None:
    core = open_core()
    stream = running(core)
    tell(
        core,
        calls.Position(session_id="s", epoch=1, ahead=3),
        calls.Started(session_id="s", epoch=1, queued_s=0.5),
        delta(0, 10, 11, text="ab"),
        calls.Recovering(session_id="s", epoch=1, why="lost"),
        delta(2, 12),
        delta(3, text="c"),
        done(),
    )
    kinds = [type(event) for event in stream.events]
    assert kinds == [QueuePosition, Started, TextDelta, Recovering, TextDelta, TextDelta, Done]
    assert "".join(stream.texts) == "abc"
    assert stream.tokens.tolist() == [10, 11, 12]
    assert stream.done is not None
    assert (stream.done.finish_reason, stream.end, stream.error) == ("stop", None, None)
    assert core.live == 0


def test_events_in_the_frame_of_the_decision_are_not_lost() -> None:
    core = open_core()
    call = submitted(core)
    tell(core, calls.Decisions(rid=call.rid, decisions=[accepted()]), delta(0, 1, text="a"), done())
    assert call.settled
    assert call.streams[0].texts == ["a"]
    assert call.streams[0].ended


@pytest.mark.parametrize("stranger", [{"session_id": "other"}, {"epoch": 2}])
def test_tokens_of_another_session_or_epoch_are_dropped_and_counted(stranger: dict[str, Any]) -> None:
    core = open_core()
    stream = running(core)
    tell(core, delta(0, 1, text="not mine", **stranger))
    assert stream.events == []
    assert core.dropped == 1


def test_nothing_is_added_after_the_end() -> None:
    core = open_core()
    stream = running(core)
    tell(core, delta(0, 1, text="a"), done(), delta(1, 2, text="late"), done(DoneReason.FAILED))
    assert stream.texts == ["a"]
    assert core.dropped == 2


@pytest.mark.parametrize("index", [0, 2])
def test_a_stream_with_a_gap_or_a_repeat_breaks_and_is_cancelled(index: int) -> None:
    core = open_core()
    stream = running(core)
    tell(core, delta(0, 1, text="a"), delta(index, 2, text="b"))
    assert isinstance(stream.error, MalformedMessage)
    assert stream.texts == ["a"]
    (cancel,) = sent(core)
    assert isinstance(cancel, calls.Cancel)
    assert (cancel.session_id, cancel.epoch, cancel.key) == ("s", 1, b"k" * 16)


def test_a_refusal_is_an_error_with_every_decision() -> None:
    core = open_core()
    call = submitted(core, "a", "b")
    tell(core, calls.Decisions(rid=call.rid, decisions=[refused(), refused()]))
    assert isinstance(call.error, Overloaded)
    assert call.error.retry_after_s == 1.5
    assert len(call.error.decisions) == 2
    assert core.live == 0


def test_a_group_that_was_taken_in_part_is_given_up() -> None:
    core = open_core()
    call = submitted(core, "a", "b")
    sent(core)
    tell(core, calls.Decisions(rid=call.rid, decisions=[accepted(), refused()]))
    assert isinstance(call.error, Overloaded)
    assert [type(message) for message in sent(core)] == [calls.Cancel]


def test_a_submission_whose_caller_left_is_cancelled_once_it_is_accepted() -> None:
    core = open_core()
    call = submitted(core)
    sent(core)
    core.abandon(call)
    assert sent(core) == []
    tell(core, calls.Decisions(rid=call.rid, decisions=[accepted()]))
    (cancel,) = sent(core)
    assert isinstance(cancel, calls.Cancel)


def test_decisions_of_the_wrong_number_are_a_protocol_error() -> None:
    core = open_core()
    call = submitted(core)
    tell(core, calls.Decisions(rid=call.rid, decisions=[accepted(), accepted("t")]))
    assert isinstance(call.error, MalformedMessage)


def test_a_cancel_by_this_caller_is_no_error_and_one_by_another_is() -> None:
    core = open_core()
    mine = running(core)
    core.cancel(mine)
    tell(core, done(DoneReason.CANCELLED))
    assert mine.done is not None
    assert mine.end is None
    theirs = running(core)
    tell(core, done(DoneReason.CANCELLED, "drained"))
    assert isinstance(theirs.end, Cancelled)
    assert theirs.end.detail == "drained"


def test_cancelling_what_has_ended_sends_nothing() -> None:
    core = open_core()
    stream = running(core)
    tell(core, done())
    call = core.cancel(stream)
    assert call.settled
    assert call.reply.found is False
    assert sent(core) == []


@pytest.mark.parametrize(
    ("reason", "kind"), [(DoneReason.DEADLINE, DeadlineExceeded), (DoneReason.FAILED, SessionFailed)]
)
def test_a_failed_end_keeps_the_text_that_came(reason: DoneReason, kind: type[Exception]) -> None:
    core = open_core()
    stream = running(core)
    tell(core, delta(0, 1, text="partly"), done(reason, "why"))
    assert isinstance(stream.end, kind)
    assert stream.end is not None
    assert (stream.end.text, stream.end.detail) == ("partly", "why")


def test_a_lost_connection_fails_every_call_and_session_once() -> None:
    core = open_core()
    stream = running(core)
    call = core.ask("status")
    told: list[str] = []
    stream.on_change = lambda: told.append("stream")
    call.on_change = lambda: told.append("call")
    core.lose(Unavailable("gone"))
    core.lose(Unavailable("gone again"))
    assert isinstance(stream.error, Unavailable)
    assert isinstance(call.error, Unavailable)
    assert stream.error is not call.error
    assert sorted(told) == ["call", "stream"]
    with pytest.raises(Unavailable, match="gone"):
        core.ask("status")
    core.check()


def test_a_new_connection_sends_nothing_of_the_old_one() -> None:
    core = open_core()
    core.ask("status")
    core.lose(Unavailable("gone"))
    core.connect()
    assert [type(message) for message in sent(core)] == [calls.Hello]
    tell(core, calls.Welcome(major=1, minor=0, boot_id="b2"))
    assert core.boot_id == "b2"
    core.ask("status")


def test_hello_first_means_a_new_broker_and_a_new_hello() -> None:
    core = open_core()
    stream = running(core)
    call = core.ask("status")
    sent(core)
    tell(core, calls.Failure(rid=call.rid, code="hello_first"))
    assert isinstance(stream.error, Unavailable)
    assert isinstance(call.error, Unavailable)
    assert [type(message) for message in sent(core)] == [calls.Hello]


def test_another_version_is_final() -> None:
    core = Core()
    core.connect()
    tell(core, calls.Failure(code="version", field="major", message="this node speaks 9"))
    assert core.state is State.REFUSED
    with pytest.raises(VersionMismatch, match="speaks 9"):
        core.ask("status")
    core.lose(Unavailable("gone"))
    core.connect()
    assert core.state is State.REFUSED


def test_a_failure_without_a_request_id_leaves_nobody_waiting() -> None:
    core = open_core()
    waiting = [core.ask("status"), core.tokenize("x")]
    tell(core, calls.Failure(code="malformed", message="what?"))
    assert all(isinstance(call.error, MalformedMessage) for call in waiting)


def test_a_failure_names_the_field_as_the_caller_wrote_it() -> None:
    core = open_core()
    call = submitted(core)
    tell(core, calls.Failure(rid=call.rid, code="malformed", field="requests[0].params.top_k", message="no"))
    assert isinstance(call.error, InvalidRequest)
    assert call.error.field == "top_k"


def test_requests_larger_than_a_frame_are_refused_before_sending() -> None:
    core = open_core()
    with pytest.raises(InvalidRequest, match="together"):
        submitted(core, "x" * (2 << 20), "y" * (2 << 20), "z" * (1 << 20))
    assert sent(core) == []
    core.check()


def test_closing_says_goodbye_and_fails_what_waits() -> None:
    core = open_core()
    stream = running(core)
    call = core.ask("status")
    sent(core)
    core.close()
    assert sent(core) == [calls.Goodbye()]
    assert isinstance(stream.error, ClientClosed)
    assert isinstance(call.error, ClientClosed)
    with pytest.raises(ClientClosed):
        core.ask("status")
    core.close()
    core.connect()
    assert core.state is State.CLOSED
    assert sent(core) == []


def test_about_to_close_every_session_is_cancelled() -> None:
    core = open_core()
    stream = running(core)
    ends: list[int] = []
    core.on_end = lambda: ends.append(core.live)
    core.cancel_all()
    assert [type(message) for message in sent(core)] == [calls.Cancel]
    tell(core, done(DoneReason.CANCELLED))
    assert ends == [0]
    assert stream.end is None


@given(st.binary(max_size=200))
def test_bytes_that_are_not_the_protocol_are_malformed_or_harmless(frame: bytes) -> None:
    core = open_core()
    stream = running(core)
    with suppress(MalformedMessage):
        core.receive(frame)
    core.check()
    assert stream.texts == []


_WORDS = st.lists(st.tuples(st.integers(0, 4), st.text(max_size=3)), max_size=20)


@given(_WORDS, st.integers(0, 19))
def test_joined_deltas_equal_the_text_however_they_are_cut(words: list[tuple[int, str]], cut: int) -> None:
    core = open_core()
    stream = running(core)
    messages: list[calls.ToClient] = []
    index = 0
    for count, text in words:
        messages.append(delta(index, *range(count), text=text))
        index += count
    for part in (messages[:cut], messages[cut:]):
        tell(core, *part)
    assert "".join(stream.texts) == "".join(text for _, text in words)
    assert len(stream.tokens) == index
