"""The real worker process with the reference engine, driven over its real socket."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from worker_driver import WorkerDriver, decode, prefill

from treadle_shared.limits import PROTOCOL_MAJOR, PROTOCOL_MINOR
from treadle_shared.ticks import Heartbeat, Probe, TickResult, WorkerBye, WorkerHello, WorkerWelcome
from treadle_worker.serving import MAX_OUTSTANDING

PROMPT = [256, 72, 101, 121]
LONG = 8_192  # tokens of a prompt that keeps the reference engine busy for seconds


@pytest.fixture
def make_worker() -> Iterator[Callable[..., WorkerDriver]]:
    drivers: list[WorkerDriver] = []

    def make(**settings: Any) -> WorkerDriver:
        drivers.append(WorkerDriver(**settings))
        return drivers[-1]

    yield make
    for driver in drivers:
        driver.close()


@pytest.fixture
def worker(make_worker: Callable[..., WorkerDriver]) -> WorkerDriver:
    """A worker that is welcomed and idle."""
    driver = make_worker()
    driver.welcome()
    return driver


# ---- handshake


def test_hello_says_what_the_engine_is(make_worker: Callable[..., WorkerDriver]) -> None:
    driver = make_worker(max_sessions=3, session_tokens=100)
    hello = driver.wait(WorkerHello)
    assert (hello.major, hello.minor, hello.pid) == (PROTOCOL_MAJOR, PROTOCOL_MINOR, driver.process.pid)
    assert (hello.engine, hello.model, hello.numerics) == ("reference", "reference", "exact")
    assert (hello.facts.max_sequences, hello.facts.context_tokens) == (4, 100)  # one is the cache
    assert hello.facts.exact


def test_hello_is_repeated_until_the_welcome_and_not_after(make_worker: Callable[..., WorkerDriver]) -> None:
    driver = make_worker()
    driver.wait(WorkerHello)
    driver.welcome()  # waits for a second hello
    driver.run(prefill=[prefill(0, 1, PROMPT)])
    heard = len(driver.heard)
    # what could still have been under way has arrived when a second's heartbeats have
    driver.wait_until(lambda: len(driver.heard) > heard + 30, "thirty more messages")
    assert not any(isinstance(message, WorkerHello) for message in driver.heard[heard:])


def test_every_line_of_the_log_names_the_process(worker: WorkerDriver) -> None:
    worker.run(prefill=[prefill(0, 1, PROMPT)])
    assert worker.events("welcomed")
    assert {line["process"] for line in worker.log()} == {"worker"}


def test_heartbeats_tell_phase_and_progress(worker: WorkerDriver) -> None:
    first = worker.wait(Heartbeat)
    assert (first.phase, first.progress, first.tick_age_s) == ("ready", 0, 0.0)
    worker.run(prefill=[prefill(0, 1, PROMPT)])
    worker.wait(Heartbeat, lambda beat: beat.progress == 1)


@pytest.mark.parametrize(("reason", "code"), [("version", 1), ("recipe", 1), ("tokenizer", 78)])
def test_a_refusal_that_no_retry_changes_ends_the_process(
    make_worker: Callable[..., WorkerDriver], reason: str, code: int
) -> None:
    driver = make_worker()
    driver.wait(WorkerHello)
    driver.refuse(reason)
    assert driver.exit_code() == code
    [event] = driver.events("refused_for_good")
    assert event["reason"] == reason


def test_a_busy_broker_is_asked_again(make_worker: Callable[..., WorkerDriver]) -> None:
    driver = make_worker()
    driver.wait(WorkerHello)
    driver.refuse("busy")
    driver.welcome()
    assert driver.run(prefill=[prefill(0, 1, PROMPT)])[-1].rows


def test_a_welcome_of_another_major_version_ends_the_process(make_worker: Callable[..., WorkerDriver]) -> None:
    driver = make_worker()
    hello = driver.wait(WorkerHello)
    driver.say(WorkerWelcome(major=PROTOCOL_MAJOR + 1, minor=0, broker_id="b", worker_id=hello.worker_id))
    assert driver.exit_code() == 1


# ---- ticks


def test_ticks_run_and_a_release_empties_the_slot(worker: WorkerDriver) -> None:
    [first] = worker.run(prefill=[prefill(0, 1, PROMPT), prefill(1, 1, PROMPT[:2])])
    assert [(row.slot, row.gen) for row in first.rows] == [(0, 1), (1, 1)]
    assert first.kv_tokens == 6
    [second] = worker.run(decode=[decode(0, 1, 4), decode(1, 1, 2)])
    assert all(0 <= row.token < 258 for row in second.rows)
    assert second.kv_tokens == 8
    [third] = worker.run(release=[0, 1])
    assert (third.last, third.rows, third.kv_tokens) == (True, [], 0)


def test_the_decode_part_comes_before_the_prefill_part(worker: WorkerDriver) -> None:
    worker.run(prefill=[prefill(0, 1, PROMPT)])
    parts = worker.run(decode=[decode(0, 1, 4)], prefill=[prefill(1, 1, PROMPT)])
    assert [(part.part, part.last, [row.slot for row in part.rows]) for part in parts] == [
        (0, False, [0]),
        (1, True, [1]),
    ]


def test_two_ticks_in_flight_are_answered_in_order(worker: WorkerDriver) -> None:
    worker.run(prefill=[prefill(0, 1, PROMPT)])
    numbers = [worker.tick(decode=[decode(0, 1, 4)]), worker.tick(decode=[decode(0, 1, 5)])]
    worker.results(numbers[-1])
    answered = [message.tick_id for message in worker.heard if isinstance(message, TickResult)]
    assert answered[-2:] == numbers


def test_an_invalid_tick_is_refused_with_those_after_it_until_a_resync(worker: WorkerDriver) -> None:
    worker.run(prefill=[prefill(0, 1, PROMPT)])
    bad, next_one = worker.tick(decode=[decode(0, 1, 40)]), worker.tick(decode=[decode(0, 1, 4)])
    [refused], [skipped] = worker.results(bad), worker.results(next_one)
    assert (refused.not_run, refused.error_code) == (True, -1)
    assert "position 40" in refused.error
    assert (skipped.not_run, skipped.error_code) == (True, 0)
    [ran] = worker.run(decode=[decode(0, 1, 4)], resync=True)
    assert not ran.not_run
    assert ran.rows[0].token >= 0


def test_frames_that_are_not_the_protocol_are_counted_and_survived(worker: WorkerDriver) -> None:
    for frames in ([b""], [b"\xc1"], [b"\x80" * 100], [os.urandom(64)], [b"a", b"b"], [b"\x81\xa4type\xa4nope"]):
        worker.say_raw(frames)
    worker.say(Probe(broker_id=worker.broker_id))
    assert worker.run(prefill=[prefill(0, 1, PROMPT)])[-1].rows
    worker.wait_until(lambda: bool(worker.events("malformed_frames")), "the count is logged")
    assert sum(event["new"] for event in worker.events("malformed_frames")) <= 6


def test_ticks_for_somebody_else_are_ignored(worker: WorkerDriver) -> None:
    strange = [worker.tick(broker_id="stranger"), worker.tick(worker_id="another")]
    worker.run(prefill=[prefill(0, 1, PROMPT)])
    answered = {message.tick_id for message in worker.heard if isinstance(message, TickResult)}
    assert answered.isdisjoint(strange)


def test_more_ticks_than_a_broker_may_have_out_are_dropped(make_worker: Callable[..., WorkerDriver]) -> None:
    driver = make_worker(session_tokens=LONG)
    driver.welcome()
    driver.tick(prefill=[prefill(0, 1, PROMPT * (LONG // len(PROMPT)))])
    driver.wait(Heartbeat, lambda beat: beat.tick_age_s > 0)
    for _ in range(MAX_OUTSTANDING + 2):
        driver.tick(release=[5])
    driver.wait_until(lambda: bool(driver.events("ignored_ticks")), "some are dropped")
    driver.wait(Heartbeat)
    assert driver.process.poll() is None
    assert driver.events("ignored_ticks")[-1]["total"] <= 3


# ---- brokers come and go


def test_a_broker_that_knows_nobody_is_offered_an_empty_worker(worker: WorkerDriver) -> None:
    worker.run(prefill=[prefill(0, 1, PROMPT)])
    worker.restart_broker("broker-2")
    worker.wait(Heartbeat)
    worker.refuse("unknown")
    hello = worker.welcome()
    assert hello.pid == worker.process.pid
    [part] = worker.run(prefill=[prefill(0, 1, PROMPT)])  # the slot is free again
    assert (part.not_run, part.kv_tokens) == (False, 4)


def test_a_broker_that_is_gone_is_missed_and_its_slots_are_freed(worker: WorkerDriver) -> None:
    worker.run(prefill=[prefill(0, 1, PROMPT)])
    worker.stop_broker()
    worker.wait_until(lambda: bool(worker.events("broker_lost")), "the loss is noticed")
    worker.restart_broker("broker-2")
    worker.welcome()
    assert worker.run(prefill=[prefill(0, 7, PROMPT)])[-1].kv_tokens == 4


def test_a_second_welcome_empties_every_slot_again(worker: WorkerDriver) -> None:
    worker.run(prefill=[prefill(0, 1, PROMPT)])
    worker.say(
        WorkerWelcome(
            major=PROTOCOL_MAJOR, minor=PROTOCOL_MINOR, broker_id=worker.broker_id, worker_id=worker.worker_id
        )
    )
    assert worker.run(prefill=[prefill(0, 1, PROMPT)])[-1].kv_tokens == 4


# ---- ends


def test_sigterm_says_goodbye_and_exits_0(worker: WorkerDriver) -> None:
    worker.run(prefill=[prefill(0, 1, PROMPT)])
    worker.signal(signal.SIGTERM)
    worker.wait(WorkerBye)
    assert worker.exit_code() == 0


def test_sigterm_lets_the_running_tick_finish_and_no_other(make_worker: Callable[..., WorkerDriver]) -> None:
    driver = make_worker(session_tokens=LONG)
    driver.welcome()
    running = driver.tick(prefill=[prefill(0, 1, PROMPT * 600)])
    queued = driver.tick(prefill=[prefill(1, 1, PROMPT)])
    driver.wait(Heartbeat, lambda beat: beat.tick_age_s > 0)
    driver.signal(signal.SIGTERM)
    driver.wait(WorkerBye)
    assert driver.exit_code() == 0
    answered = {message.tick_id for message in driver.heard if isinstance(message, TickResult)}
    assert running in answered
    assert queued not in answered


def test_a_tick_that_takes_too_long_ends_the_process_for_its_supervisor(
    make_worker: Callable[..., WorkerDriver],
) -> None:
    driver = make_worker(session_tokens=LONG, tick_timeout_s=0.01)
    driver.welcome()
    driver.tick(prefill=[prefill(0, 1, PROMPT * (LONG // len(PROMPT)))])
    assert driver.exit_code() == 70
    [event] = driver.events("tick_timeout")
    assert event["tick_age_s"] > event["limit_s"] == 0.01


def test_a_second_signal_does_not_wait(make_worker: Callable[..., WorkerDriver]) -> None:
    driver = make_worker(session_tokens=LONG)
    driver.welcome()
    driver.tick(prefill=[prefill(0, 1, PROMPT * (LONG // len(PROMPT)))])
    driver.wait(Heartbeat, lambda beat: beat.tick_age_s > 0)
    driver.signal(signal.SIGTERM)
    driver.wait(Heartbeat, lambda beat: beat.phase == "draining")
    driver.signal(signal.SIGTERM)
    assert driver.exit_code() == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine": "llama", "model": "/no/such/model.gguf"}, "/no/such/model.gguf: no such file"),
        ({"engine": "llama"}, "model: must be the path of a GGUF file"),
        ({"cpus": "65000"}, "cpus: CPU 65000 is not there, or not allowed to this process"),
        ({"weight_bytes": 1}, "weight_bytes: the model needs"),
    ],
)
def test_what_a_restart_cannot_help_exits_78_with_one_line(
    make_worker: Callable[..., WorkerDriver], settings: dict[str, Any], message: str
) -> None:
    if settings.get("engine") == "llama":
        pytest.importorskip("llama_cpp")
    driver = make_worker(**settings)
    assert driver.exit_code() == 78
    [line] = driver.log()
    assert line["event"] == "refused_to_start"
    assert line["message"].startswith(message)


def test_a_setting_that_is_absurd_exits_78_naming_the_key(make_worker: Callable[..., WorkerDriver]) -> None:
    driver = make_worker(environ={"TREADLE_SESSION_TOKENS": "-3"})
    assert driver.exit_code() == 78
    [line] = driver.log()
    assert line["message"].startswith("session_tokens: ")


def test_a_directory_open_to_others_exits_78(make_worker: Callable[..., WorkerDriver]) -> None:
    driver = make_worker()
    driver.welcome()
    driver.signal(signal.SIGTERM)
    assert driver.exit_code() == 0
    driver.directory.path.chmod(0o755)
    driver.start()
    assert driver.exit_code() == 78
    assert "is open to other users" in driver.events("refused_to_start")[0]["message"]


# ---- the service manager


def test_the_service_manager_is_told_status_ready_watchdog_and_stopping(
    make_worker: Callable[..., WorkerDriver], tmp_path: Path
) -> None:
    manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    manager.bind(str(tmp_path / "notify"))
    manager.settimeout(60)
    try:
        environ = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "100000"}
        driver = make_worker(environ=environ)
        told = _told_until(manager, "WATCHDOG=1")
        assert "READY=1" in told
        driver.welcome()
        driver.signal(signal.SIGTERM)
        assert "STOPPING=1" in _told_until(manager, "STOPPING=1")
        assert driver.exit_code() == 0
    finally:
        manager.close()


def _told_until(manager: socket.socket, word: str) -> str:
    told = ""
    while word not in told:
        told += manager.recv(4096).decode() + "\n"
    return told
