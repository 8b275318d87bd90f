"""The synchronous client over real sockets, against a broker that does what the test says."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_broker import FakeBroker
from real_node import wait_for

from treadle import (
    CallTimeout,
    Cancelled,
    Client,
    ClientClosed,
    DeadlineExceeded,
    Done,
    ForkedClient,
    InvalidRequest,
    Overloaded,
    ProtocolError,
    QueuePosition,
    Recovering,
    Session,
    SessionFailed,
    Started,
    TextDelta,
    Unavailable,
    VersionMismatch,
)
from treadle.control import Control
from treadle.errors import Forbidden
from treadle_shared import AdmissionDecision, AdmissionReason, DoneReason, calls
from treadle_shared.rundir import RuntimeDir

WORDS = "a b c d e f g h"
ENDLESS = " ".join(f"w{number}" for number in range(100_000))


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[FakeBroker]:
    with FakeBroker(RuntimeDir(tmp_path / "node")) as broker:
        yield broker


@pytest.fixture
def client(broker: FakeBroker) -> Iterator[Client]:
    with Client(broker.directory.path) as client:
        yield client


def _is_cancelled(broker: FakeBroker, session: Session) -> None:
    wait_for(lambda: broker.live == 0, "the node runs nothing any more")
    assert session.wait(5.0) == "cancelled"


# ---- generations


def test_iterating_yields_text_and_the_facts_stand_at_the_end(client: Client) -> None:
    session = client.generate(WORDS, max_tokens=20, seed=42)
    pieces = list(session)
    assert all(isinstance(piece, str) and piece for piece in pieces)
    assert "".join(pieces) == session.text == WORDS
    assert session.tokens == list(range(8))
    assert (session.finish_reason, session.seed, session.prompt_tokens) == ("stop", 42, 8)
    assert session.usage is not None
    assert session.usage.completion_tokens == 8
    assert session.timings is not None
    assert session.timings.ttft_s == 0.1
    assert session.exact is True
    assert list(session) == pieces


def test_events_tell_everything_in_order(broker: FakeBroker, client: Client) -> None:
    broker.slots = 1
    broker.go.clear()
    client.generate("first in the line")
    session = client.generate("x y", logprobs=0)
    assert session.admission.position == 1
    broker.recover.set()
    broker.go.set()
    events = list(session.events())
    kinds = [type(event) for event in events if not isinstance(event, Recovering)]
    assert kinds[0] is QueuePosition
    assert [kind for kind in kinds if kind is not QueuePosition] == [Started, TextDelta, TextDelta, Done]
    assert [token.logprob for token in session.logprobs] == [-0.5, -0.5]


def test_a_session_that_recovers_says_so_and_goes_on(broker: FakeBroker, client: Client) -> None:
    session = client.generate(ENDLESS)
    events = session.events()
    while not isinstance(next(events), TextDelta):
        pass
    broker.recover.set()
    assert any(isinstance(event, Recovering) for event in events)
    assert not session.ended or session.finish_reason == "stop"


def test_a_chat_and_token_ids_are_sent_as_such(broker: FakeBroker, client: Client) -> None:
    assert client.chat([{"role": "user", "content": "hi there"}]).result() == "hi there"
    assert client.generate([1, 2]).result() == "<1> <2>".replace(" ", "")
    submits = [message for message in broker.seen if isinstance(message, calls.Submit)]
    assert submits[0].requests[0].messages == [calls.ChatMessage(role="user", content="hi there")]
    assert submits[1].requests[0].tokens == b"\1\0\0\0\2\0\0\0"


def test_many_are_submitted_in_one_message(broker: FakeBroker, client: Client) -> None:
    sessions = client.submit_many([{"prompt": "a b"}, {"messages": [{"role": "user", "content": "c"}]}])
    assert [session.result() for session in sessions] == ["a b", "c"]
    assert broker.count(calls.Submit) == 1


def test_facts_come_as_dictionaries(client: Client) -> None:
    assert client.status() == {"ready": True}
    assert client.model_info() == {"name": "fake"}
    assert client.telemetry() == {}
    assert client.tokenize("hé") == [256, 104, 195, 169]
    with pytest.raises(InvalidRequest):
        client.tokenize("\ud800")


def test_a_session_that_nobody_reads_holds_up_no_other(client: Client) -> None:
    unread = client.generate(" ".join(str(number) for number in range(500)))
    for _ in range(3):
        assert client.generate("x y z").result() == "x y z"
    assert len(unread.result(30.0).split()) == 500


def test_sixty_four_threads_share_a_client_and_none_sees_anothers_words(client: Client) -> None:
    texts = [f"code{number} " * 5 for number in range(64)]
    got = [""] * len(texts)

    def ask(place: int) -> None:
        got[place] = "".join(client.generate(texts[place]))

    threads = [threading.Thread(target=ask, args=(place,)) for place in range(len(texts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert got == texts


# ---- refusals and failures


def test_a_refusal_is_raised_with_its_numbers(broker: FakeBroker, client: Client) -> None:
    broker.refuse = lambda request: AdmissionDecision(
        reason=AdmissionReason.REJECTED_QUEUE_FULL,
        session_id="",
        budget="queue_depth",
        needed=1,
        limit=4,
        retry_after_s=0.5,
    )
    with pytest.raises(Overloaded) as refused:
        client.generate("x")
    assert (refused.value.budget, refused.value.limit, refused.value.retry_after_s) == ("queue_depth", 4, 0.5)
    with pytest.raises(Overloaded) as refused:
        client.submit_many([{"prompt": "a"}, {"prompt": "b"}])
    assert len(refused.value.decisions) == 2


def test_a_wrong_value_is_refused_before_anything_is_sent(broker: FakeBroker, client: Client) -> None:
    with pytest.raises(InvalidRequest, match="flavour"):
        client.generate("x", flavour="mint")  # type: ignore[call-arg]
    with pytest.raises(InvalidRequest, match="max_tokens"):
        client.generate("x", max_tokens="5")  # type: ignore[arg-type]
    assert client.generate("x").result() == "x"
    assert broker.count(calls.Submit) == 1


@pytest.mark.parametrize(
    ("reason", "kind"), [(DoneReason.DEADLINE, DeadlineExceeded), (DoneReason.FAILED, SessionFailed)]
)
def test_an_end_that_was_not_asked_for_is_raised_after_the_text(
    broker: FakeBroker, client: Client, reason: DoneReason, kind: type[Exception]
) -> None:
    broker.end_with["bad"] = (reason, "because")
    session = client.generate("bad end here")
    got = []
    with pytest.raises(kind, match="because"):
        got.extend(session)
    with pytest.raises(kind):
        session.result()
    assert session.wait() == reason.value.lower()
    assert isinstance(list(session.events())[-1], Done)


def test_a_stream_with_a_hole_breaks_instead_of_going_on(broker: FakeBroker, client: Client) -> None:
    broker.skip_token_at = 2
    session = client.generate(ENDLESS)
    with pytest.raises(ProtocolError):
        session.result(10.0)
    assert session.text == "w0 w1"
    wait_for(lambda: broker.live == 0, "the broken session is cancelled")


def test_another_major_version_is_told_at_once(tmp_path: Path) -> None:
    directory = RuntimeDir(tmp_path / "node")
    with FakeBroker(directory, major=9), pytest.raises(VersionMismatch, match="version 9"):
        Client(directory.path)


def test_bytes_that_are_not_the_protocol_end_the_streams_and_not_the_client(broker: FakeBroker, client: Client) -> None:
    broker.go.clear()
    session = client.generate("x y")
    broker.garbage = b"\xc1 nonsense"
    with pytest.raises(ProtocolError):
        session.result(10.0)
    broker.go.set()
    assert wait_for(lambda: _works(client), "the client has a new connection")


def _works(client: Client) -> bool:
    try:
        return client.generate("again").result() == "again"
    except (Unavailable, ProtocolError):
        return False


# ---- cancelling


def test_leaving_the_loop_cancels(broker: FakeBroker, client: Client) -> None:
    session = client.generate(ENDLESS)
    for _ in session:
        break
    _is_cancelled(broker, session)
    assert session.result().startswith("w0")


def test_leaving_the_sessions_block_cancels(broker: FakeBroker, client: Client) -> None:
    with client.generate(ENDLESS) as session:
        assert next(iter(session)) == "w0"
    _is_cancelled(broker, session)


def test_an_exception_in_the_loop_cancels(broker: FakeBroker, client: Client) -> None:
    session = client.generate(ENDLESS)
    with pytest.raises(ZeroDivisionError):
        sum(1 // (len(text) - 2) for text in session)  # the first text is "w0"
    _is_cancelled(broker, session)


def test_leaving_the_clients_block_cancels_and_hears_of_it(broker: FakeBroker) -> None:
    with Client(broker.directory.path) as client:
        session = client.generate(ENDLESS)
    assert session.finish_reason == "cancelled"
    assert broker.live == 0
    with pytest.raises(ClientClosed):
        client.status()
    client.close()


def test_cancel_says_whether_there_was_something_to_cancel(broker: FakeBroker, client: Client) -> None:
    session = client.generate(ENDLESS)
    assert session.cancel() is True
    _is_cancelled(broker, session)
    assert session.cancel() is False
    assert "".join(session) == session.text


def test_a_cancel_by_somebody_else_is_an_error(broker: FakeBroker, client: Client) -> None:
    session = client.generate(ENDLESS, session_id="victim")
    with Control(broker.directory.path) as control:
        assert control.cancel("victim") is True
        assert control.cancel("victim") is False
    with pytest.raises(Cancelled):
        session.result(5.0)


@pytest.mark.parametrize("waiting", ["session.result()", "list(session)"])
@pytest.mark.parametrize("received", ["os.kill(os.getpid(),", "signal.pthread_kill(threading.get_ident(),"])
def test_ctrl_c_cancels_the_waiting_session_and_goes_on_up(broker: FakeBroker, waiting: str, received: str) -> None:
    script = f"""
        import os, signal, sys, threading
        from treadle import Client

        def interrupt():
            while not session._changed._waiters:  # the main thread is on its way to wait
                os.sched_yield()
            {received} signal.SIGINT)

        with Client(sys.argv[1]) as client:
            session = client.generate("x y")
            threading.Thread(target=interrupt, daemon=True).start()
            try:
                {waiting}
            except KeyboardInterrupt:
                print(session.wait(5.0), flush=True)
                raise
    """
    broker.go.clear()
    command = [sys.executable, "-c", textwrap.dedent(script), str(broker.directory.path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout == "cancelled\n"
    assert "KeyboardInterrupt" in done.stderr
    assert done.returncode in (-signal.SIGINT, 130)
    assert broker.live == 0


def test_a_program_that_just_ends_says_goodbye(broker: FakeBroker) -> None:
    script = "import sys; from treadle import Client; c = Client(sys.argv[1]); c.generate('x y')"
    broker.go.clear()
    subprocess.run([sys.executable, "-X", "dev", "-c", script, str(broker.directory.path)], check=True, timeout=30)
    wait_for(lambda: broker.count(calls.Goodbye) == 1, "goodbye is said")
    assert broker.live == 0


def test_a_forgotten_client_closes_itself(broker: FakeBroker) -> None:
    client = Client(broker.directory.path)
    thread = client._link._thread
    gone = weakref.ref(client)
    del client
    gc.collect()
    assert gone() is None
    thread.join(5.0)
    assert not thread.is_alive()


def test_a_session_keeps_its_client_alive(broker: FakeBroker) -> None:
    session = Client(broker.directory.path).generate("a b c")
    gc.collect()
    assert session.result() == "a b c"


# ---- timeouts


def test_a_decision_that_does_not_come_in_time_is_given_up(broker: FakeBroker, client: Client) -> None:
    broker.silent.add(calls.Submit)
    with pytest.raises(CallTimeout) as late:
        client.generate("x", timeout=0.1)
    assert isinstance(late.value, TimeoutError)
    broker.silent.clear()
    assert client.generate("y").result() == "y"


def test_a_stream_that_stands_still_is_left_after_the_idle_timeout(broker: FakeBroker, client: Client) -> None:
    broker.go.clear()
    session = client.generate("x y", idle_timeout=0.1)
    with pytest.raises(CallTimeout):
        list(session)
    broker.go.set()
    _is_cancelled(broker, session)


def test_a_wait_that_takes_too_long_leaves_the_session_running(broker: FakeBroker, client: Client) -> None:
    broker.go.clear()
    session = client.generate("x y")
    with pytest.raises(CallTimeout):
        session.result(0.05)
    broker.go.set()
    assert session.result(timeout=float("inf")) == "x y"


# ---- a broker that is not there, dies, or comes back


def test_no_broker_is_unavailable_and_says_how_to_start_one(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(Unavailable, match="treadle serve") as missing:
        Client(tmp_path / "nothing", timeout=0.2)
    assert str(tmp_path / "nothing") in str(missing.value)
    assert time.monotonic() - began < 8.0


def test_a_client_waits_for_a_broker_that_is_about_to_start(tmp_path: Path) -> None:
    directory = RuntimeDir(tmp_path / "node")
    texts: list[str] = []

    def ask() -> None:
        with Client(directory.path, timeout=20.0) as client:
            texts.append(client.generate("early bird").result())

    thread = threading.Thread(target=ask)
    thread.start()
    with FakeBroker(directory):
        thread.join(20.0)
    assert texts == ["early bird"]


def test_a_broker_that_dies_fails_everything_that_waits_within_a_second(broker: FakeBroker, client: Client) -> None:
    broker.go.clear()
    broker.silent.add(calls.Ask)
    sessions = [client.generate("x y") for _ in range(3)]
    errors: list[BaseException] = []

    def wait(what: str) -> None:
        try:
            if what == "status":
                client.status()
            elif what == "loop":
                list(sessions[0])
            else:
                sessions[1].result()
        except Unavailable as error:
            errors.append(error)

    threads = [threading.Thread(target=wait, args=(what,)) for what in ("status", "loop", "result")]
    for thread in threads:
        thread.start()
    wait_for(lambda: broker.count(calls.Ask) == 1, "the question is asked")
    broker.die()
    began = time.monotonic()
    for thread in threads:
        thread.join(5.0)
    assert time.monotonic() - began < 5.0
    assert len(errors) == 3
    with pytest.raises(Unavailable):
        client.status()
    with pytest.raises(Unavailable):
        sessions[2].result()


def test_a_client_serves_again_once_a_new_broker_is_there(broker: FakeBroker, client: Client) -> None:
    broker.go.clear()
    session = client.generate("x y")
    broker.die()
    with pytest.raises(Unavailable):
        session.result(5.0)
    with FakeBroker(broker.directory, boot_id="boot-2"):
        assert wait_for(lambda: _works(client), "the client has a new connection")


def test_a_broker_that_forgot_the_client_is_a_new_one(broker: FakeBroker, client: Client) -> None:
    broker.go.clear()
    session = client.generate("x y")
    broker.forget_clients.set()
    with pytest.raises(Unavailable):
        client.status()
    with pytest.raises(Unavailable):
        session.result(5.0)
    broker.go.set()
    assert wait_for(lambda: _works(client), "the client has said hello again")


def test_what_came_before_the_broker_died_is_still_there(broker: FakeBroker, client: Client) -> None:
    session = client.generate(ENDLESS)
    stream = iter(session)
    first = [next(stream) for _ in range(20)]
    broker.die()
    with pytest.raises(Unavailable):
        first.extend(stream)
    assert "".join(first) == session.text
    assert session.finish_reason is None
    assert ENDLESS.startswith(session.text)


# ---- operators


def test_the_control_endpoint_shows_and_ends_sessions(broker: FakeBroker, client: Client) -> None:
    broker.go.clear()
    client.generate("x y", session_id="mine")
    with pytest.raises(Forbidden):
        client._fact("sessions", 5.0)
    with Control(broker.directory.path) as control:
        assert control.sessions()["sessions"] == [{"session_id": "mine", "epoch": 1, "state": "DECODING"}]
        assert control.status() == {"ready": True}
        assert control.drain(5.0)["draining"] is True


# ---- forks


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # forking with threads is what is tested
def test_a_client_made_before_a_fork_refuses_to_be_used_after_it(broker: FakeBroker, client: Client) -> None:
    broker.go.clear()
    session = client.generate("x y")
    uses = [
        lambda: client.generate("x"),
        lambda: client.chat([{"role": "user", "content": "x"}]),
        lambda: client.submit_many([{"prompt": "x"}]),
        lambda: client.tokenize("x"),
        client.model_info,
        client.status,
        client.telemetry,
        lambda: list(session),
        session.events,
        session.wait,
        session.result,
        session.cancel,
    ]
    child = os.fork()
    if child == 0:
        refused = 0
        for use in uses:
            try:
                use()
            except ForkedClient:
                refused += 1
            except BaseException:
                os._exit(99)
        client.close()
        os._exit(refused)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == len(uses)
    broker.go.set()
    assert session.result() == "x y"
