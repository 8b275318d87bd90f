"""The runtime directory: where a node lives and how it is found.

It is private (0700, or 0770 for a group), held by one broker through ``flock``, and contains every socket.
"""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from treadle_shared.errors import NodeRunningError, RuntimeDirError

SYSTEM_DIR = Path("/run/treadle")
LOCK_FILE = "broker.lock"
MAX_SOCKET_PATH = 107  # sun_path of unix(7) holds 108 bytes with its terminating zero

_LOCK_TRIES = 20  # with the pause: 0.2 s, far longer than any number of onlookers hold it
_LOCK_PAUSE_S = 0.01


class RuntimeDir:
    """Paths and endpoints inside one runtime directory."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()

    @property
    def clients(self) -> str:
        """ROUTER endpoint for clients."""
        return self._endpoint("clients")

    @property
    def control(self) -> str:
        """ROUTER endpoint for the operator's commands."""
        return self._endpoint("control")

    @property
    def worker(self) -> str:
        """ROUTER endpoint for the worker."""
        return self._endpoint("worker")

    @property
    def telemetry(self) -> str:
        """XPUB endpoint of the telemetry."""
        return self._endpoint("telemetry")

    @property
    def replay(self) -> str:
        """ROUTER endpoint that repeats past telemetry."""
        return self._endpoint("replay")

    def _endpoint(self, name: str) -> str:
        socket = str(self.path / f"{name}.sock")
        if len(os.fsencode(socket)) > MAX_SOCKET_PATH:
            raise RuntimeDirError(f"{socket}: longer than a socket path may be ({MAX_SOCKET_PATH} bytes)")
        return f"ipc://{socket}"

    def create(self) -> None:
        """Make the directory, private. Raises RuntimeDirError where it is open to others or not ours."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            info = self.path.stat()
        except OSError as error:
            raise RuntimeDirError(f"{self.path}: {error.strerror}") from None
        if not stat.S_ISDIR(info.st_mode):
            raise RuntimeDirError(f"{self.path}: is not a directory")
        if info.st_mode & 0o007:
            raise RuntimeDirError(f"{self.path}: is open to other users; make it 0700 or 0770")
        if info.st_uid not in (os.geteuid(), 0):
            raise RuntimeDirError(f"{self.path}: belongs to another user (uid {info.st_uid})")
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise RuntimeDirError(f"{self.path}: is not writable")

    @property
    def open_to_group(self) -> bool:
        """Whether members of the directory's group may use the node."""
        return bool(self.path.stat().st_mode & 0o070)

    def is_live(self) -> bool:
        """Whether a broker holds this directory now."""
        try:
            descriptor = os.open(self.path / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False


class NodeLock:
    """The broker's hold on its runtime directory, for as long as the process lives."""

    def __init__(self, directory: RuntimeDir) -> None:
        self._file = directory.path / LOCK_FILE
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Take the lock. Raises NodeRunningError, naming the holder's process id, or RuntimeDirError."""
        try:
            descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)  # the group may look
        except OSError as error:
            raise RuntimeDirError(f"{self._file}: {error.strerror}") from None
        if not _locked(descriptor):
            holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(descriptor)
            raise NodeRunningError(f"{self._file.parent}: a broker lives there already (pid {holder})")
        self._descriptor = descriptor
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        except OSError as error:
            self.release()
            raise RuntimeDirError(f"{self._file}: {error.strerror}") from None

    def release(self) -> None:
        """Give the lock back; the file stays, so that nobody can lock an unlinked one."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _locked(descriptor: int) -> bool:
    """Whether the lock could be taken; somebody who only looks (``is_live``) holds it for an instant."""
    for _ in range(_LOCK_TRIES):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(_LOCK_PAUSE_S)
    return False


def private_dir(environ: Mapping[str, str] | None = None) -> Path:
    """The per-user directory: under XDG_RUNTIME_DIR, else under the temporary directory by user id."""
    env = os.environ if environ is None else environ
    base = env.get("XDG_RUNTIME_DIR")
    if base and os.path.isdir(base):
        return Path(base) / "treadle"
    return Path(tempfile.gettempdir()) / f"treadle-{os.getuid()}"


def find_runtime_dir(argument: str | os.PathLike[str] | None = None) -> RuntimeDir:
    """Where to look for a node: the argument, TREADLE_RUNTIME_DIR, the private per-user directory if a broker
    lives there, ``/run/treadle`` if one lives there, else the private directory.
    """
    if argument:
        return RuntimeDir(Path(argument))
    if named := os.environ.get("TREADLE_RUNTIME_DIR"):
        return RuntimeDir(Path(named))
    private, system = RuntimeDir(private_dir()), RuntimeDir(SYSTEM_DIR)
    if not private.is_live() and system.is_live():
        return system
    return private
