"""What can go wrong, and whose fault it is.

TreadleError
├── ConfigError            the operator's: one configuration key holds an unusable value
├── RuntimeDirError        the operator's: the runtime directory cannot be used
│   └── NodeRunningError   another process already holds that node
├── InvalidRequest         the caller's: one field of a request cannot be served
├── ProtocolError          the peer's: bytes that are not the protocol
│   ├── MalformedMessage   not a known message, or a field out of its bounds
│   └── VersionMismatch    another major version of the protocol
└── EngineError            the engine's
    ├── ModelError         the model cannot be loaded (the worker exits 78)
    ├── WeightBudgetError  the weights exceed their budget (the worker exits 78)
    ├── PartialShardError  an adapter that does not cover every layer
    ├── InvalidTick        a tick that contradicts the engine's own positions
    └── DecodeFailed       the engine refused or failed a batch
"""

from __future__ import annotations

EXIT_CONFIG = 78
"""``EX_CONFIG`` of sysexits.h: a restart cannot help; the supervisor must not try one."""


class TreadleError(Exception):
    """Base of every error that this project raises on purpose."""


class ConfigError(TreadleError):
    """One configuration key holds an unusable value.

    ``key`` is the key as it is written in the configuration file.
    """

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(f"{key}: {problem}")
        self.key = key
        self.problem = problem


class RuntimeDirError(TreadleError):
    """The runtime directory is missing, foreign or not private."""


class NodeRunningError(RuntimeDirError):
    """Another process holds the lock of this runtime directory."""


class InvalidRequest(TreadleError):  # noqa: N818  (the name the service is known by)
    """One field of a request cannot be served; ``field`` names it."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}" if field else problem)
        self.field = field
        self.problem = problem


class ProtocolError(TreadleError):
    """A peer sent bytes that are not the protocol."""


class MalformedMessage(ProtocolError):  # noqa: N818
    """Not a known message, or a field outside its bounds; ``field`` is its path, or empty."""

    def __init__(self, problem: str, field: str = "") -> None:
        super().__init__(f"{field}: {problem}" if field else problem)
        self.field = field
        self.problem = problem


class VersionMismatch(ProtocolError):  # noqa: N818
    """The peer speaks another major version of the protocol."""


class EngineError(TreadleError):
    """The engine cannot do what it was asked."""


class ModelError(EngineError):
    """The model file cannot be loaded; the message says which file and why."""


class WeightBudgetError(EngineError):
    """The model's weights exceed the weight budget (both in bytes)."""

    def __init__(self, needed: int, limit: int) -> None:
        super().__init__(f"weight_bytes: the model needs {needed} bytes of weights, the budget is {limit}")
        self.needed = needed
        self.limit = limit


class PartialShardError(EngineError):
    """An adapter that runs only some of the model's layers cannot sample tokens."""


class InvalidTick(EngineError):  # noqa: N818
    """A tick contradicts what the engine holds; nothing of it was run."""


class DecodeFailed(EngineError):  # noqa: N818
    """The engine returned ``code`` for a batch; positions must be read back from it."""

    def __init__(self, code: int, problem: str) -> None:
        super().__init__(f"decode returned {code}: {problem}")
        self.code = code
