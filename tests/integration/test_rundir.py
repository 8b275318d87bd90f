"""The runtime directory: private, held by one process, found in a fixed order."""

from __future__ import annotations

import fcntl
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from treadle_shared import rundir
from treadle_shared.errors import NodeRunningError, RuntimeDirError
from treadle_shared.rundir import LOCK_FILE, MAX_SOCKET_PATH, NodeLock, RuntimeDir, find_runtime_dir, private_dir

HOLDER = """
import sys
from pathlib import Path
from treadle_shared.rundir import NodeLock, RuntimeDir
directory = RuntimeDir(Path(sys.argv[1]))
directory.create()
NodeLock(directory).acquire()
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def held_by_another_process(path: Path) -> Iterator[int]:
    """A second process holds the directory's lock until the block ends; gives its process id."""
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process.pid
        process.stdin.close()
        assert process.wait(timeout=30) == 0


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Every place where a node may live, inside a temporary directory."""
    found = {"argument": tmp_path / "a", "variable": tmp_path / "v", "system": tmp_path / "s"}
    (tmp_path / "x").mkdir()
    found["private"] = tmp_path / "x" / "treadle"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "x"))
    monkeypatch.delenv("TREADLE_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(rundir, "SYSTEM_DIR", found["system"])
    return found


def test_a_new_directory_is_private(tmp_path: Path) -> None:
    directory = RuntimeDir(tmp_path / "deep" / "node")
    directory.create()
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
    directory.create()


@pytest.mark.parametrize("mode", [0o700, 0o770, 0o750])
def test_a_directory_for_its_owner_or_a_group_is_taken(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    RuntimeDir(tmp_path).create()
    assert stat.S_IMODE(tmp_path.stat().st_mode) == mode


@pytest.mark.parametrize("mode", [0o701, 0o704, 0o702, 0o755, 0o777])
def test_a_directory_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(RuntimeDirError, match="open to other users") as caught:
        RuntimeDir(tmp_path).create()
    assert str(tmp_path) in str(caught.value)


def test_a_file_in_the_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "node").touch()
    for path in (tmp_path / "node", tmp_path / "node" / "below"):
        with pytest.raises(RuntimeDirError, match=r"node.*(exists|directory)"):
            RuntimeDir(path).create()


@pytest.mark.skipif(os.geteuid() == 0, reason="everything is writable to root")
def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(RuntimeDirError, match="not writable"):
        RuntimeDir(tmp_path).create()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    os.chown(tmp_path, 65534, -1)
    with pytest.raises(RuntimeDirError, match="another user"):
        RuntimeDir(tmp_path).create()


def test_every_socket_lies_in_the_directory(tmp_path: Path) -> None:
    directory = RuntimeDir(tmp_path)
    endpoints = [directory.clients, directory.control, directory.worker, directory.telemetry, directory.replay]
    assert len(set(endpoints)) == 5
    assert all(endpoint.startswith(f"ipc://{tmp_path}/") for endpoint in endpoints)


def test_a_path_too_long_for_a_socket_is_refused() -> None:
    name = "telemetry.sock"
    fits = RuntimeDir(Path("/" + "x" * (MAX_SOCKET_PATH - len(name) - 2)))
    assert len(fits.telemetry) == len("ipc://") + MAX_SOCKET_PATH
    with pytest.raises(RuntimeDirError, match="longer than a socket path"):
        _ = RuntimeDir(Path(f"{fits.path}x")).telemetry
    with pytest.raises(RuntimeDirError, match="longer than a socket path"):
        _ = RuntimeDir(Path("/" + "é" * (MAX_SOCKET_PATH // 2))).clients


def test_one_process_holds_a_directory_at_a_time(tmp_path: Path) -> None:
    directory = RuntimeDir(tmp_path)
    tmp_path.chmod(0o700)
    assert not directory.is_live()
    with held_by_another_process(tmp_path) as pid:
        assert directory.is_live()
        with pytest.raises(NodeRunningError, match=rf"pid {pid}\b"):
            NodeLock(directory).acquire()
    assert not directory.is_live()
    lock = NodeLock(directory)
    lock.acquire()
    assert directory.is_live()
    assert (tmp_path / LOCK_FILE).read_text() == f"{os.getpid()}\n"
    lock.release()
    lock.release()
    assert not directory.is_live()


def test_looking_whether_a_node_lives_does_not_hinder_it(tmp_path: Path) -> None:
    directory = RuntimeDir(tmp_path)
    lock = NodeLock(directory)
    for _ in range(3):
        assert not directory.is_live()
        lock.acquire()
        assert directory.is_live()
        lock.release()


def test_somebody_who_only_looks_does_not_keep_a_node_from_starting(tmp_path: Path) -> None:
    lock = NodeLock(RuntimeDir(tmp_path))
    with (tmp_path / LOCK_FILE).open("w") as look:
        fcntl.flock(look, fcntl.LOCK_SH)
        end_of_look = threading.Timer(0.03, fcntl.flock, (look, fcntl.LOCK_UN))
        end_of_look.start()
        lock.acquire()
        end_of_look.join()
    assert RuntimeDir(tmp_path).is_live()
    lock.release()


def test_a_killed_holder_leaves_the_directory_free(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        process.kill()
        process.wait(timeout=30)
    assert (tmp_path / LOCK_FILE).exists()
    lock = NodeLock(RuntimeDir(tmp_path))
    lock.acquire()
    lock.release()


def test_the_argument_comes_first(places: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREADLE_RUNTIME_DIR", str(places["variable"]))
    assert find_runtime_dir(places["argument"]).path == places["argument"]
    assert find_runtime_dir(str(places["argument"])).path == places["argument"]


def test_the_variable_comes_before_any_live_node(places: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREADLE_RUNTIME_DIR", str(places["variable"]))
    with held_by_another_process(places["private"]), held_by_another_process(places["system"]):
        assert find_runtime_dir().path == places["variable"]


def test_a_live_private_node_comes_before_the_systems(places: dict[str, Path]) -> None:
    with held_by_another_process(places["private"]), held_by_another_process(places["system"]):
        assert find_runtime_dir().path == places["private"]


def test_the_systems_node_is_found_where_no_private_one_lives(places: dict[str, Path]) -> None:
    with held_by_another_process(places["system"]):
        assert find_runtime_dir().path == places["system"]


def test_without_any_node_the_private_directory_is_meant(places: dict[str, Path]) -> None:
    assert find_runtime_dir().path == places["private"]
    assert find_runtime_dir("").path == places["private"]


def test_the_private_directory_is_the_users_own(tmp_path: Path) -> None:
    assert private_dir({"XDG_RUNTIME_DIR": str(tmp_path)}) == tmp_path / "treadle"
    for environ in ({}, {"XDG_RUNTIME_DIR": ""}, {"XDG_RUNTIME_DIR": str(tmp_path / "absent")}):
        assert private_dir(environ).name == f"treadle-{os.getuid()}"
