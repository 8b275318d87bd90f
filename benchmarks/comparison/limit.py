"""llama-batched-bench: what the model alone can do, with nobody to serve."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from typing import Any, Final

from comparison.errors import BenchmarkError
from comparison.peers import Peers
from comparison.systems import Setting
from treadle_shared.errors import ModelError
from treadle_worker.llama.gguf import inspect_model
from treadle_worker.llama.kv_types import KvTypes, choose_kv_types
from treadle_worker.llama.library import load_library
from treadle_worker.llama.switches import KernelSwitches, choose_switches

_TIMEOUT_S: Final = 900.0


def measure_limit(
    peers: Peers, setting: Setting, prompt_tokens: int, new_tokens: int, levels: Sequence[int]
) -> dict[int, float]:
    """For each level the generated tokens a second of prefilling all prompts and then decoding all answers.

    Flash attention, KV layout and kernels are those that the worker chooses for the setting's model and numerics.
    Raises BenchmarkError.
    """
    switches, kv_types = kernels_of(setting)
    command = [str(peers.batched_bench), *_flags(setting, switches, kv_types, prompt_tokens, new_tokens, levels)]
    environ = dict(setting.environ) | ({} if switches.tiled_kernels else {"GGML_CPU_TILED_MM": "0"})
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=_TIMEOUT_S)
    rows = [row for line in (done.stdout + done.stderr).splitlines() if (row := _row(line))]
    if done.returncode != 0 or len(rows) != len(levels):
        raise BenchmarkError(f"llama-batched-bench left with code {done.returncode}: {done.stderr[-300:]}")
    return {row["pl"]: row["pl"] * row["tg"] / (row["t_pp"] + row["t_tg"]) for row in rows}


def kernels_of(setting: Setting) -> tuple[KernelSwitches, KvTypes]:
    """What the worker chooses on a CPU. Raises BenchmarkError where the model cannot be read."""
    try:
        types = inspect_model(load_library(), setting.model).weight_types
    except ModelError as error:
        raise BenchmarkError(str(error)) from None
    exact = setting.numerics == "exact"
    kv_types = choose_kv_types(exact, "auto", offloaded=False)
    return choose_switches(exact, types, kv_types), kv_types


def _flags(
    setting: Setting,
    switches: KernelSwitches,
    kv_types: KvTypes,
    prompt_tokens: int,
    new_tokens: int,
    levels: Sequence[int],
) -> list[str]:
    threads = str(setting.threads)
    return [
        *("--model", str(setting.model), "--ctx-size", str(max(levels) * setting.session_tokens)),
        *("--threads", threads, "--threads-batch", threads),
        *("-npp", str(prompt_tokens), "-ntg", str(new_tokens), "-npl", ",".join(map(str, levels))),
        *("--flash-attn", "on" if switches.flash_attention else "off"),
        *("--cache-type-k", kv_types.key, "--cache-type-v", kv_types.value),
        "--kv-unified" if switches.unified_kv else "--no-kv-unified",
        *(() if switches.repacked_weights else ("--no-repack",)),
        *("--output-format", "jsonl"),
    ]


def _row(line: str) -> dict[str, Any] | None:
    if not line.startswith("{"):
        return None
    row: dict[str, Any] = json.loads(line)
    return row if "t_tg" in row else None
