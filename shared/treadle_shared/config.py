"""Configuration of a node: a TOML file, then ``TREADLE_*`` environment variables, then flags.

Read once at start, frozen, passed down. Every key is checked against its bounds, and what contradicts
another key is refused too; the error names the key.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from treadle_shared.codec import split_path
from treadle_shared.errors import ConfigError
from treadle_shared.limits import MAX_SEQUENCES
from treadle_shared.request import MAX_NEW_TOKENS

ENV_PREFIX = "TREADLE_"
NODE_FILE = "node.toml"  # what a supervisor leaves in the runtime directory for its children

MIN_SESSION_TOKENS = 8  # the shortest context that is of any use
MIN_SLICE_TOKENS = 4  # a shorter turn would cost more to begin than it yields

_MOST_DERIVED_CACHE_SLOTS = 8  # each takes the memory of a whole session

Positive = Annotated[int, Meta(ge=1, lt=1 << 53)]
PositiveSeconds = Annotated[float, Meta(gt=0.0, le=86_400.0)]


class NodeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every setting of a node. Lengths in tokens, sizes in bytes, times in seconds.

    ``None`` means "derived": the budgets from the loaded model and the other settings, ``numerics`` from the
    device (exact on a CPU, fast on a GPU), ``threads`` from the CPUs this process may use, ``prefix_sharing`` from who
    may open the runtime directory (node where that is one user, else client).
    """

    # the model and how it runs
    engine: Literal["llama", "reference"] = "llama"
    model: str = ""
    numerics: Literal["exact", "fast"] | None = None
    threads: Annotated[int, Meta(ge=1, le=1024)] | None = None
    cpus: Annotated[str, Meta(pattern=r"^([0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*)?$")] = ""
    n_gpu_layers: Annotated[int, Meta(ge=-1, le=10_000)] = 0
    device: str = ""
    kv_type: Literal["auto", "f16", "f32", "bf16", "q8_0", "q4_0"] = "auto"
    ubatch_tokens: Annotated[int, Meta(ge=2, le=8192)] = 512
    reference_seed: Annotated[int, Meta(ge=0, lt=1 << 32)] = 0
    chat_template: str = ""

    # what it admits
    max_sessions: Annotated[int, Meta(ge=1, le=MAX_SEQUENCES)] = 8
    session_tokens: Annotated[int, Meta(ge=MIN_SESSION_TOKENS, le=1 << 20)] = 2048
    queue_depth: Annotated[int, Meta(ge=0, le=100_000)] = 256
    queue_tokens: Positive = 1 << 20
    kv_bytes: Positive | None = None
    weight_bytes: Positive | None = None
    scratch_bytes: Positive | None = None
    default_max_tokens: Annotated[int, Meta(ge=1, le=MAX_NEW_TOKENS)] = 256
    kv_policy: Literal["reserve", "optimistic"] = "reserve"
    slots: Annotated[int, Meta(ge=1, le=MAX_SEQUENCES)] | None = None
    park_bytes: Annotated[int, Meta(ge=0, lt=1 << 53)] | None = None
    cache_slots: Annotated[int, Meta(ge=0, lt=MAX_SEQUENCES)] | None = None
    prefix_sharing: Literal["client", "node", "off"] | None = None

    # how it schedules
    max_batch_size: Annotated[int, Meta(ge=1, le=MAX_SEQUENCES)] = MAX_SEQUENCES
    max_prefill_tokens_per_tick: Annotated[int, Meta(ge=1, le=1 << 20)] = 160
    burst_prefill_tokens_per_tick: Annotated[int, Meta(ge=0, le=1 << 20)] = 512
    target_itl_ms: Annotated[int, Meta(ge=0, le=60_000)] = 0
    target_ttft_ms: Annotated[int, Meta(ge=0, le=3_600_000)] = 0
    coalesce_ms: Annotated[int, Meta(ge=0, le=250)] = 40
    tick_depth: Literal[1, 2] = 2
    slice_tokens: Annotated[int, Meta(ge=MIN_SLICE_TOKENS, le=1 << 20)] = 32

    # how long it waits
    tick_timeout_s: PositiveSeconds = 30.0
    heartbeat_s: Annotated[float, Meta(gt=0.0, le=60.0)] = 0.5
    worker_silence_s: PositiveSeconds = 3.0
    load_timeout_s: PositiveSeconds = 600.0
    orphan_timeout_s: PositiveSeconds = 10.0
    resume_grace_s: PositiveSeconds = 10.0
    result_ttl_s: PositiveSeconds = 60.0
    drain_timeout_s: PositiveSeconds = 30.0
    max_unread_tokens: Positive = 1 << 20

    # what it does wrong on purpose, for tests
    faults: str = ""

    # what it tells
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["auto", "json", "console"] = "auto"
    telemetry_interval_s: Annotated[float, Meta(gt=0.0, le=3600.0)] = 0.5
    telemetry_replay: Annotated[int, Meta(ge=1, le=1_000_000)] = 4096
    tick_log: str = ""
    tick_log_bytes: Annotated[int, Meta(ge=1 << 20, le=1 << 40)] = 64 << 20

    def __post_init__(self) -> None:
        if self.worker_silence_s < 2 * self.heartbeat_s:
            raise ConfigError("worker_silence_s", f"must be at least twice heartbeat_s ({self.heartbeat_s})")
        if self.slots is not None and self.slots > self.max_sessions:
            raise ConfigError("slots", f"must not exceed max_sessions ({self.max_sessions})")
        if self.kv_policy == "reserve" and self.effective_slots < self.max_sessions:
            raise ConfigError("slots", 'may be fewer than max_sessions only with kv_policy = "optimistic"')
        if self.effective_slots + (self.cache_slots or 0) > MAX_SEQUENCES:
            raise ConfigError("cache_slots", f"with {self.effective_slots} slots exceeds {MAX_SEQUENCES}")

    @property
    def effective_slots(self) -> int:
        """Sequences that the engine holds for sessions: ``slots``, or one for each of ``max_sessions``."""
        return self.max_sessions if self.slots is None else self.slots

    @property
    def effective_max_tokens(self) -> int:
        """The ``max_tokens`` of a request that names none; never more than half of what a session holds."""
        return min(self.default_max_tokens, self.session_tokens // 2)

    @property
    def effective_cache_slots(self) -> int:
        """``cache_slots``, or half of the slots, at least 1 and at most 8; none where nothing is shared."""
        if self.prefix_sharing == "off":
            return 0
        if self.cache_slots is not None:
            return self.cache_slots
        slots = self.effective_slots
        return min(max(1, slots // 2), _MOST_DERIVED_CACHE_SLOTS, MAX_SEQUENCES - slots)

    @property
    def effective_numerics(self) -> Literal["exact", "fast"]:
        """``numerics``, or the default of the device: exact on a CPU, fast on a GPU."""
        if self.numerics is not None:
            return self.numerics
        return "exact" if self.engine == "reference" or self.n_gpu_layers == 0 else "fast"


def load_config(
    file: Path | None = None,
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> NodeConfig:
    """Read the configuration; later sources win. Flags that are None are absent.

    Raises ConfigError naming the key, with the variable or file that set it if one did, or a file that is not TOML.
    """
    written = _from_file(file) if file else {}
    environ = os.environ if environ is None else environ
    variables = _variables(environ)
    named = {key: _from_variable(key, name, environ[name]) for key, name in variables.items()}
    flagged = {key: value for key, value in (flags or {}).items() if value is not None}
    try:
        return make_config(written | named | flagged)
    except ConfigError as error:
        source = variables.get(error.key, str(file) if error.key in written else "")
        if error.key in flagged or not source:
            raise
        raise _set_by(source, error) from None


def read_node_config(directory: Path, named: str | None) -> NodeConfig:
    """A process's configuration: the named file, else the one a supervisor left in the runtime directory, if any;
    the environment on top. Raises ConfigError.
    """
    left = directory / NODE_FILE
    file = Path(named) if named else (left if left.exists() else None)
    return load_config(file)


def make_config(settings: Mapping[str, Any]) -> NodeConfig:
    """A NodeConfig from plain values. Raises ConfigError naming the key."""
    for key, value in settings.items():
        if isinstance(value, float) and value != value:
            raise ConfigError(key, "must be a number, not NaN")
    try:
        return msgspec.convert(dict(settings), NodeConfig)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        problem, key = split_path(str(error))
        raise _explained(key or "configuration", problem, settings) from None


def config_to_toml(config: NodeConfig) -> str:
    """The settings that are not None as flat TOML."""
    lines = []
    for key, value in msgspec.structs.asdict(config).items():
        if value is not None:
            lines.append(f"{key} = {_toml_value(value)}")
    return "\n".join(lines) + "\n"


def _explained(key: str, problem: str, settings: Mapping[str, Any]) -> ConfigError:
    if "unknown field" in problem:
        return ConfigError(key, "is not a known key")
    if "enum value" in problem:
        return ConfigError(key, f"must be one of {_choices(key)} (given: {settings.get(key)!r})")
    given = f" (given: {settings[key]!r})" if key in settings else ""
    return ConfigError(key, problem[:1].lower() + problem[1:] + given)


def _choices(key: str) -> str:
    """The values of a setting that has few."""
    hint = get_type_hints(NodeConfig)[key]
    literals = [part for part in (hint, *get_args(hint)) if get_origin(part) is Literal]
    return ", ".join(str(value) for literal in literals for value in get_args(literal))


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):  # a JSON string is a TOML basic string once DEL is escaped
        return msgspec.json.encode(value).decode().replace("\x7f", "\\u007f")
    return repr(value)


def _from_file(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as stream:
            return tomllib.load(stream)
    except OSError as error:
        raise ConfigError("config", f"{file}: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError("config", f"{file} is not TOML: {error}") from None


_NOT_SETTINGS = frozenset({"TREADLE_RUNTIME_DIR", "TREADLE_CONFIG"})
"""Variables that say where a node is, not how it runs."""


def _variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variable that sets each key: names count in either case, and the last of them wins."""
    names = [name for name in environ if name.startswith(ENV_PREFIX) and name not in _NOT_SETTINGS]
    return {name.removeprefix(ENV_PREFIX).lower(): name for name in names}


def _from_variable(key: str, name: str, text: str) -> Any:
    if key not in NodeConfig.__struct_fields__:
        raise ConfigError(name, "is not a known setting")
    try:
        return setting_from_text(key, text)
    except ConfigError as error:
        raise _set_by(name, error) from None


def _set_by(source: str, error: ConfigError) -> ConfigError:
    return ConfigError(error.key, f"{error.problem}; set by {source}")


def setting_from_text(key: str, text: str) -> Any:
    """The typed value of a setting from a flag's or a variable's text; an empty one of an optional key means None.
    Raises ConfigError naming the key, and the values it may have where they are few.
    """
    hint = get_type_hints(NodeConfig, include_extras=True)[key]
    if not text and type(None) in get_args(hint):
        return None
    if _is_text(hint):
        return text
    try:
        return msgspec.convert(text, hint, strict=False)
    except msgspec.ValidationError as error:
        raise _explained(key, str(error), {key: text}) from None


def _is_text(hint: Any) -> bool:
    if get_origin(hint) is Annotated:
        return _is_text(get_args(hint)[0])
    return hint is str
