"""Notifications reach a service manager's datagram socket, and no state of that socket stops the service."""

import os
import socket
import tempfile
import uuid
from pathlib import Path

import pytest

from treadle_shared.notify import Notifier


@pytest.fixture
def directory():
    """A path short enough for a socket, which pytest's own may not be."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


def manager_at(address):
    manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    manager.bind(address)
    manager.settimeout(5.0)
    return manager


@pytest.fixture(params=["path", "abstract"])
def manager(request, directory, monkeypatch):
    """A service manager's socket, announced in NOTIFY_SOCKET as systemd does."""
    name = f"treadle-test-{uuid.uuid4().hex}"
    path = str(directory / "notify") if request.param == "path" else f"@{name}"
    with manager_at(path if request.param == "path" else f"\0{name}") as manager:
        monkeypatch.setenv("NOTIFY_SOCKET", path)
        yield manager


@pytest.fixture
def notifier(manager):
    notifier = Notifier()
    yield notifier
    notifier.close()


def received(manager):
    return manager.recv(4096).decode().split("\n")


def test_ready_carries_a_status(manager, notifier):
    notifier.ready("serving model.gguf")
    assert received(manager) == ["READY=1", "STATUS=serving model.gguf"]


def test_status_may_ask_for_more_time(manager, notifier):
    notifier.status("loading: 50%", extend_s=30.0)
    notifier.status("loaded")
    assert received(manager) == ["STATUS=loading: 50%", "EXTEND_TIMEOUT_USEC=30000000"]
    assert received(manager) == ["STATUS=loaded"]


def test_watchdog_and_stopping(manager, notifier):
    notifier.watchdog()
    notifier.stopping("draining")
    assert received(manager) == ["WATCHDOG=1"]
    assert received(manager) == ["STOPPING=1", "STATUS=draining"]


def test_every_message_is_one_datagram_in_order(manager, notifier):
    for n in range(5):
        notifier.status(f"tick {n} ✓")
    assert [received(manager) for _ in range(5)] == [[f"STATUS=tick {n} ✓"] for n in range(5)]


def test_without_a_manager_nothing_is_sent(monkeypatch):
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    monkeypatch.setenv("WATCHDOG_USEC", "10000000")
    notifier = Notifier()
    notifier.ready("serving")
    notifier.watchdog()
    assert notifier.watchdog_s is None
    notifier.close()


def test_a_given_address_wins_over_the_environment(directory, monkeypatch):
    monkeypatch.setenv("NOTIFY_SOCKET", str(directory / "another"))
    with manager_at(str(directory / "given")) as manager:
        notifier = Notifier(str(directory / "given"))
        notifier.watchdog()
        assert received(manager) == ["WATCHDOG=1"]
        notifier.close()


def test_a_manager_that_is_gone_stops_nobody(directory):
    manager = manager_at(str(directory / "notify"))
    notifier = Notifier(str(directory / "notify"))
    manager.close()
    notifier.ready("serving")  # refused: nobody is bound there
    (directory / "notify").unlink()
    notifier.watchdog()  # no such file
    notifier.close()


def test_a_manager_that_comes_back_is_told_again(directory):
    path = directory / "notify"
    notifier = Notifier(str(path))
    notifier.watchdog()
    with manager_at(str(path)) as manager:
        notifier.watchdog()
        assert received(manager) == ["WATCHDOG=1"]
    notifier.close()


def test_a_manager_that_does_not_read_blocks_nobody(directory):
    with manager_at(str(directory / "notify")) as manager:
        manager.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        notifier = Notifier(str(directory / "notify"))
        for _ in range(10_000):  # far more than the queue of a datagram socket holds
            notifier.watchdog()
        assert received(manager) == ["WATCHDOG=1"]
        notifier.close()


def test_a_closed_notifier_says_nothing(manager, notifier):
    notifier.close()
    notifier.watchdog()
    manager.setblocking(False)
    with pytest.raises(BlockingIOError):
        manager.recv(4096)


def test_the_watchdog_is_due_at_half_its_time(notifier, monkeypatch):
    monkeypatch.setenv("WATCHDOG_USEC", "10000000")
    monkeypatch.delenv("WATCHDOG_PID", raising=False)
    assert notifier.watchdog_s == 5.0
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    assert notifier.watchdog_s == 5.0


@pytest.mark.parametrize(
    ("micros", "pid"),
    [(None, None), ("", None), ("0", None), ("-5", None), ("soon", None), ("10000000", "1")],
    ids=["unset", "empty", "zero", "negative", "not a number", "meant for another process"],
)
def test_no_watchdog_is_fed_where_none_is_asked_for(notifier, monkeypatch, micros, pid):
    for name, value in (("WATCHDOG_USEC", micros), ("WATCHDOG_PID", pid)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert notifier.watchdog_s is None
