"""A flag for every key of a node's configuration, made from its type."""

from __future__ import annotations

import argparse
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from treadle_shared.config import NodeConfig, setting_from_text

_PREFIX: Final = "config."
_HELP: Final = {
    "engine": "llama: a GGUF through llama.cpp; reference: a small numpy model without a download",
    "model": "the GGUF file; without one the demo model",
    "numerics": "exact: a session's tokens never depend on load; fast: the quickest kernels",
    "threads": "CPU threads of the engine",
    "cpus": "CPUs that the worker may use, such as 0-3,8",
    "n_gpu_layers": "layers on the GPU; -1 is all",
    "device": "the device to load on, by its name",
    "ubatch_tokens": "tokens that the engine computes at once",
    "reference_seed": "seed of the reference engine's weights",
    "chat_template": "a Jinja template in place of the model's own",
    "kv_type": "number type of the KV cache",
    "max_sessions": "sessions that run at once",
    "session_tokens": "tokens that one session may hold, prompt and answer together",
    "queue_depth": "requests that may wait",
    "queue_tokens": "prompt tokens that may wait",
    "kv_bytes": "KV cache of running sessions, and of prefixes kept beside them",
    "weight_bytes": "most bytes of weights; a larger model is refused",
    "scratch_bytes": "most bytes outside weights and KV",
    "max_prefill_tokens_per_tick": "prompt tokens between two decodes",
    "burst_prefill_tokens_per_tick": "the same while many wait for a first token or stream; 0 for no more",
    "target_itl_ms": "milliseconds between two tokens of a stream that prefill is held to; 0 for none",
    "target_ttft_ms": "milliseconds to the first token beyond which a request is refused; 0 for none",
    "coalesce_ms": "milliseconds that tokens may wait for one another; 0 for none",
    "tick_depth": "2: ticks are sent while one runs; 1: each waits for the answer before",
    "kv_policy": "reserve: a session's whole KV is set aside; optimistic: sessions may take turns in fewer slots",
    "slots": "sequences that the engine holds at once; fewer than sessions only under optimistic",
    "slice_tokens": "tokens that a session gets before it gives its slot to one that waits",
    "park_bytes": "most bytes of host memory for the KV of sessions that wait for their next turn",
    "cache_slots": "sequences that keep prefixes of finished sessions; 0 turns every reuse off",
    "prefix_sharing": "whose requests may start from one another's prompt",
    "default_max_tokens": "length of an answer whose request names none",
    "max_batch_size": "sessions that decode in one tick",
    "tick_timeout_s": "a worker whose tick runs longer is replaced",
    "heartbeat_s": "seconds between two heartbeats of the worker",
    "worker_silence_s": "a worker that is silent for longer is lost",
    "load_timeout_s": "seconds for loading the model",
    "orphan_timeout_s": "sessions of a client that vanished are cancelled after this",
    "resume_grace_s": "seconds after a start in which resumed sessions go first",
    "result_ttl_s": "seconds that the log of a finished session is kept",
    "max_unread_tokens": "unread tokens of one client, beyond which it is refused",
    "faults": "for tests: rules ACTION@TRIGGER by which the engine dies, hangs or fails",
    "log_level": "least level that is logged",
    "log_format": "auto: JSON lines unless standard error is a terminal",
    "telemetry_interval_s": "seconds between two snapshots",
    "telemetry_replay": "events of each topic that are kept for the replay",
    "tick_log": "write every scheduling decision to this file, for `treadle replay`",
    "tick_log_bytes": "most bytes of that file and its predecessor together",
    "drain_timeout_s": "seconds for what runs when the node stops",
}


def add_node_flags(parser: argparse.ArgumentParser, wins_over: str = "its TREADLE_* variable") -> None:
    """Declare ``--max-sessions`` and its like; values stay text until ``flags_of``."""
    group = parser.add_argument_group("configuration", f"each wins over {wins_over}")
    for key, hint in _hints().items():
        group.add_argument("--" + key.replace("_", "-"), dest=_PREFIX + key, metavar=_metavar(hint), help=_help(key))


def flags_of(args: argparse.Namespace) -> dict[str, Any]:
    """The flags that were given, typed. Raises ConfigError naming the key."""
    given = {key: getattr(args, _PREFIX + key) for key in _hints()}
    return {key: setting_from_text(key, text) for key, text in given.items() if text is not None}


def _hints() -> dict[str, Any]:
    hints = get_type_hints(NodeConfig, include_extras=True)
    return {key: hints[key] for key in NodeConfig.__struct_fields__}


def _metavar(hint: Any) -> str:
    """How a value looks: the choices, or its kind."""
    kinds = _kinds(hint)
    if choices := [str(value) for kind in kinds if get_origin(kind) is Literal for value in get_args(kind)]:
        return "|".join(choices)
    return {int: "N", float: "X"}.get(kinds[0], "TEXT")


def _kinds(hint: Any) -> list[Any]:
    if get_origin(hint) is Annotated:
        return _kinds(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        return [kind for part in get_args(hint) if part is not NoneType for kind in _kinds(part)]
    return [hint]


def _help(key: str) -> str:
    default = getattr(NodeConfig(), key)
    shown = "derived" if default is None else "none" if default == "" else default
    return f"{_HELP[key]} (default: {shown})" if key in _HELP else f"default: {shown}"
