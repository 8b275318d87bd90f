"""llama.cpp's own programs, built from the source that the installed llama-cpp-python was built from."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from comparison.errors import BenchmarkError

PACKAGE: Final = "llama-cpp-python"
TARGETS: Final = ("llama-server", "llama-batched-bench")
CMAKE_FLAGS: Final = (
    "-DCMAKE_BUILD_TYPE=Release",  # these four are what the package's own build comes to
    "-DBUILD_SHARED_LIBS=ON",
    "-DGGML_NATIVE=ON",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_OPENSSL=OFF",  # the rest leaves out what no measurement uses
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_TOOLS=ON",
    "-DLLAMA_BUILD_SERVER=ON",
)
_TOOLS: Final = {"cmake": "cmake", "ninja": "ninja-build", "c++": "g++"}  # command: Debian package
_STEP: Final = re.compile(r"^\[(\d+)/(\d+)\]")

Say = Callable[[str], None]
"""Takes one line of progress; the next one may replace it."""


@dataclass(frozen=True, slots=True)
class Peers:
    """``source``: the unpacked package; ``programs``: the folder of the built programs."""

    source: Path
    programs: Path

    @property
    def server(self) -> Path:
        """llama-server."""
        return self.programs / "llama-server"

    @property
    def batched_bench(self) -> Path:
        """llama-batched-bench."""
        return self.programs / "llama-batched-bench"

    @property
    def python_server(self) -> Path:
        """llama-cpp-python's example server."""
        return self.source / "examples" / "server" / "server.py"


def build_peers(cache: Path, say: Say) -> Peers:
    """The programs of the installed version, built in ``cache`` unless they are there. Raises BenchmarkError.

    The first time the source package is fetched (75 MB) and compiled: some ten minutes on two cores.
    """
    version = installed_version()
    source = _source(cache, version, say)
    build = cache / f"build-{version}"
    peers = Peers(source, build / "bin")
    if _built(build):
        return peers
    _check_tools()
    log = cache / f"build-{version}.log"
    with log.open("w") as output:
        say(f"configuring llama.cpp (log: {log})")
        llama = source / "vendor" / "llama.cpp"
        _run(["cmake", "-S", str(llama), "-B", str(build), "-G", "Ninja", *CMAKE_FLAGS], output, log, say)
        _run(["cmake", "--build", str(build), "--target", *TARGETS], output, log, say)
    _stamp(build).write_text("\n".join(CMAKE_FLAGS))
    return peers


def installed_version() -> str:
    """The version of the llama-cpp-python that the worker uses."""
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise BenchmarkError(f"{PACKAGE} is not installed: pip install 'treadle[node]'") from None


def pip_download(requirement: str, folder: Path) -> list[str]:
    """The command that fetches a source package, and nothing that it depends on."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    return [*pip, "--no-binary", PACKAGE, "--dest", str(folder), requirement]


def _source(cache: Path, version: str, say: Say) -> Path:
    name = f"{PACKAGE.replace('-', '_')}-{version}"
    folder = cache / name
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    archive = cache / f"{name}.tar.gz"
    if not archive.exists():
        say(f"fetching the source of {PACKAGE} {version}")
        if subprocess.run(pip_download(f"{PACKAGE}=={version}", cache)).returncode != 0:
            raise BenchmarkError(f"the source of {PACKAGE} {version} could not be fetched; pip says why above")
    say("unpacking")
    draft = cache / f"{name}.part"
    shutil.rmtree(draft, ignore_errors=True)
    with tarfile.open(archive) as tar:
        tar.extractall(draft, filter="data")
    (draft / name).rename(folder)
    draft.rmdir()
    return folder


def _stamp(build: Path) -> Path:
    return build / "built-with.txt"


def _built(build: Path) -> bool:
    """Whether everything is there, made with the present flags."""
    stamp = _stamp(build)
    return stamp.exists() and stamp.read_text() == "\n".join(CMAKE_FLAGS)


def _check_tools() -> None:
    missing = {tool: package for tool, package in _TOOLS.items() if shutil.which(tool) is None}
    if missing:
        raise BenchmarkError(
            f"{', '.join(missing)} not found; llama-server is built with it. "
            f"On Debian: apt-get install {' '.join(missing.values())}"
        )


def _run(command: Sequence[str], output: IO[str], log: Path, say: Say) -> None:
    """Run to the end, every line into the log, ninja's steps as progress."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        output.write(line)
        if step := _STEP.match(line):
            say(f"building llama-server: {step[1]} of {step[2]}")
    if process.wait() != 0:
        raise BenchmarkError(f"{command[0]} failed; the end of {log} says why")
