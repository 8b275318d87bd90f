"""llama.cpp's shared library: environment switches before it loads, its log, and its last words.

The library is process-wide state: it reads its switches once, and has one log callback. So there is one
``Library`` a process, made by ``load_library``.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import os
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import structlog

from treadle_shared.errors import ModelError
from treadle_shared.log import get_logger
from treadle_worker.llama.spinning import Spinning, adapted_spinning, prepared_spinning
from treadle_worker.llama.switches import KernelSwitches
from treadle_worker.pinning import usable_cpus

_TILED_SWITCH: Final = "GGML_CPU_TILED_MM"  # 0 turns the tiled kernels off
_TINY_BLAS: Final = "LLAMAFILE = 1"  # how a build's description names tinyBLAS

_LEVEL_ERROR, _LEVEL_CONTINUED = 4, 5  # enum ggml_log_level
_KEPT_ERRORS: Final = 4  # llama.cpp reports one fault in two or three lines, the cause first
_MAX_LINE: Final = 400  # characters of a log line; the longest useful ones hold a path and a tensor name
_MAX_RECORDED: Final = 4096  # lines of one recording; making a context logs about sixty


class LlamaLog:
    """Takes llama.cpp's log: every line goes to structlog at debug, the last error lines are kept."""

    def __init__(self) -> None:
        self._logger = get_logger("llama.cpp")
        self._errors: deque[str] = deque(maxlen=_KEPT_ERRORS)
        self._recording: deque[str] | None = None
        self._level = 0

    def receive(self, level: int, text: bytes | None, _user_data: object) -> None:
        """The callback. It may run in any thread that calls into the library, and must not raise."""
        line = (text or b"").decode("utf-8", "replace").strip()[:_MAX_LINE]
        self._level = self._level if level == _LEVEL_CONTINUED else level
        if not line.strip("."):  # the dots of the load progress
            return
        if self._level == _LEVEL_ERROR:
            self._errors.append(_without_function(line))
        if self._recording is not None:
            self._recording.append(line)
        if structlog.is_configured():  # in a program that set up no logging, stay silent
            self._logger.debug("llama_log", line=line)

    def forget_errors(self) -> None:
        """Start afresh before a call whose errors matter."""
        self._errors.clear()

    @property
    def last_error(self) -> str:
        """The first of the last error lines, which names the cause; empty where there is none."""
        return self._errors[0] if self._errors else ""

    @contextmanager
    def recorded(self) -> Iterator[deque[str]]:
        """Collect the lines logged inside the block."""
        self._recording = deque(maxlen=_MAX_RECORDED)
        try:
            yield self._recording
        finally:
            self._recording = None


class Library:
    """The loaded library. ``api`` is the ``llama_cpp`` module of ctypes functions; ``ggml`` the same shared
    object for the symbols that module does not bind; ``processors`` those the process had when it was loaded.
    ``spinning`` is there once a context is made, where it can be adapted; ``adapts`` whether it may.
    """

    def __init__(self, api: Any, processors: int, adapts: bool) -> None:
        self.api = api
        self.ggml = ctypes.CDLL(api._lib._name)
        self.log = LlamaLog()
        self.spinning: Spinning | None = None
        self._processors = processors
        self._adapts = adapts
        self._tiled: bool | None = None  # not known before the first model
        # C keeps a pointer to the callback for as long as the process lives, so this object must too.
        self._callback = api.llama_log_callback(self.log.receive)
        api.llama_log_set(self._callback, ctypes.c_void_p(0))
        api.llama_backend_init()

    @property
    def build(self) -> str:
        """Version of the binding, version of llama.cpp, and the instruction sets and options it runs with."""
        import llama_cpp

        info = self.api.llama_print_system_info().decode("utf-8", "replace").strip()
        return f"llama-cpp-python {llama_cpp.__version__}, llama.cpp {self.api.llama_version().decode()}, {info}"

    @property
    def tiny_blas(self) -> bool:
        """Whether this build has tinyBLAS, which sums float matrices otherwise from two rows on."""
        return _TINY_BLAS in self.build

    def settle(self, switches: KernelSwitches) -> KernelSwitches:
        """Set the switches that are the whole process's, before a model runs; those that are now in effect.

        llama.cpp reads them at its first computation, so the first model of a process decides.
        """
        if self._tiled is None:
            if not switches.tiled_kernels:
                os.environ[_TILED_SWITCH] = "0"
            self._tiled = os.environ.get(_TILED_SWITCH) != "0"
        return dataclasses.replace(switches, tiled_kernels=self._tiled)

    def computes_with(self, threads: int) -> None:
        """A context is made whose batches run on so many threads; how those of the first one wait is adapted."""
        if self._adapts and self.spinning is None:
            self.spinning = adapted_spinning(self.ggml, threads, self._processors)

    def working(self) -> None:
        """The calling thread is about to run a batch."""
        if self.spinning is not None:
            self.spinning.working()

    @property
    def offloads(self) -> bool:
        """Whether this build can run layers on a GPU."""
        return bool(self.api.llama_supports_gpu_offload())


def load_library(exact: bool = False) -> Library:
    """The process's library. ``exact`` turns the tiled kernels off at once, for a process that computes before
    it loads a model. Raises ModelError where llama-cpp-python is missing or broken.
    """
    if exact:
        os.environ[_TILED_SWITCH] = "0"
    return _loaded()


@functools.cache
def _loaded() -> Library:
    processors = len(usable_cpus())  # counted first, as OpenMP may pin the thread that loads it
    try:
        with prepared_spinning() as adapts:
            import llama_cpp.llama_cpp as api
    except ImportError:
        raise ModelError("llama-cpp-python is not installed; install treadle[node]") from None
    except (OSError, RuntimeError) as error:
        raise ModelError(f"llama-cpp-python cannot load its library: {error}") from None
    return Library(api, processors, adapts)


def _without_function(line: str) -> str:
    """llama.cpp starts a line with the name of the C++ function; people need the rest."""
    function, colon, rest = line.partition(": ")
    return rest if colon and " " not in function else line
