"""What a loaded model costs and how fast it is, measured on it before it serves."""

from __future__ import annotations

import time
from typing import Final

import numpy as np

from treadle_shared.config import NodeConfig
from treadle_shared.engine import EngineFacts
from treadle_worker.llama.context import LlamaContext
from treadle_worker.llama.fingerprint import fingerprint, hash_files
from treadle_worker.llama.model import LlamaModel
from treadle_worker.llama.sampler import CHAIN_BYTES

_WARM_ROWS: Final = 2  # the fewest that exact numerics run together
_PROMPT: Final = 64  # tokens of the timed prompt: enough for a rate, a fraction of a second on a small CPU
_MOVES: Final = 2  # timed moves of a saved state; the first one touches new memory
_TICKS: Final = 2  # timed decode ticks; one before them builds the graph
_TICK_BUDGET_S: Final = 0.5  # no second timed tick where one takes longer
_CELL_RECORD: Final = 12  # bytes of a saved KV cell beside K and V: position, number of sequences, sequence id
_FLOAT: Final = 4
_CANDIDATE: Final = 12  # sizeof(llama_token_data)


def measure_facts(
    model: LlamaModel, context: LlamaContext, config: NodeConfig, threads: int, exact: bool
) -> EngineFacts:
    """Run a warm-up (a small prompt, then ticks of a full decode batch) and take stock. Leaves the KV empty.

    ``exact`` is the self-test's verdict. Raises DecodeFailed where the model cannot run at all.
    """
    try:
        prefill_rate, kv_bytes, state_head = _time_prefill(context)
        park_rate = _time_parking(context)
        tick_s = _time_decode(context)
    finally:
        context.forget_all()
    return EngineFacts(
        recipe_fingerprint=recipe(model, config, threads),
        n_vocab=model.n_vocab,
        context_tokens=min(context.tokens_per_sequence, config.session_tokens, model.ctx_train or 1 << 30),
        max_sequences=context.max_sequences,
        kv_bytes_per_token=kv_bytes,
        weight_bytes=model.weight_bytes,
        scratch_bytes_per_session=scratch_bytes(model, context),
        min_prefill_rows=2 if model.keeps_roles else 1,
        replay_decode=model.keeps_roles,
        exact=exact,
        tokenizer_fingerprint=model.fingerprint_tokenizer(),
        prefill_tokens_per_s=prefill_rate,
        decode_tick_s=tick_s,
        parked_bytes_each=CHAIN_BYTES + state_head,
        parked_bytes_per_token=kv_bytes + _CELL_RECORD,
        park_tokens_per_s=park_rate,
        can_copy=model.can_copy,
    )


def scratch_bytes(model: LlamaModel, context: LlamaContext) -> int:
    """What one session costs outside KV: its logits row, the largest sampler chain, and its share of the
    compute buffers (by llama.cpp's own account) and of one candidate table.
    """
    shared = context.compute_bytes + _CANDIDATE * model.n_vocab
    return _FLOAT * model.n_vocab + CHAIN_BYTES + shared // context.max_sessions


def recipe(model: LlamaModel, config: NodeConfig, threads: int) -> str:
    """Everything that can change a token. Threads and micro-batch count only where numerics are not exact."""
    exact = config.effective_numerics == "exact"
    return fingerprint(
        [
            ("engine", "llama"),
            ("files", hash_files(model.summary.files)),
            ("model", model.description),
            ("numerics", config.effective_numerics),
            ("build", model.library.build),
            ("switches", model.switches),
            ("kv_types", model.kv_types),
            ("n_gpu_layers", config.n_gpu_layers),
            ("devices", [device.name for device in model.devices]),
            ("threads", "any" if exact else threads),
            ("ubatch", "any" if exact else config.ubatch_tokens),
        ]
    )


def _time_prefill(context: LlamaContext) -> tuple[float, int, int]:
    """Prompt tokens per second, KV bytes of one token, and bytes of a saved state beside its tokens.

    KV bytes are how much the saved state of one sequence grows with each token, less what a record holds
    beside K and V. A model that keeps no such cache (a recurrent one) grows by nothing, reported as 1. Leaves a
    sequence of the prompt in slot 0.
    """
    size = min(_PROMPT, context.n_ubatch)
    _prefill(context, 0, _WARM_ROWS)
    small = context.state_bytes(0)
    started = time.perf_counter()
    _prefill(context, _WARM_ROWS, size)
    rate = size / (time.perf_counter() - started)
    grown = context.state_bytes(0) - small
    return rate, max(grown // size - _CELL_RECORD, 1), max(small - grown * _WARM_ROWS // size, 0)


def _time_parking(context: LlamaContext) -> float:
    """Rows per second that slot 0 moves out and in again, the best of a few. Leaves the KV empty."""
    best, rows = float("inf"), context.length(0)
    for _ in range(_MOVES):
        started = time.perf_counter()
        state = context.save_state(0)
        context.forget(0)
        context.load_state(0, state)
        best = min(best, time.perf_counter() - started)
    context.forget_all()
    return rows / best


def _prefill(context: LlamaContext, start: int, size: int) -> None:
    context.fill(0, start, np.arange(size) % context.model.n_vocab)
    context.batch.output[size - 1] = 1
    context.run(size, 1)


def _time_decode(context: LlamaContext) -> float:
    """Seconds of one tick with a row for every session, the best of a few."""
    rows, best = context.max_sessions, float("inf")
    for position in range(1 + _TICKS):
        for slot in range(rows):
            context.fill(slot, position, [slot % context.model.n_vocab], slot)
        context.batch.output[:rows] = 1
        started = time.perf_counter()
        context.run(rows, rows)
        if position:
            best = min(best, time.perf_counter() - started)
        if _TICK_BUDGET_S < best < float("inf"):
            break
    return best
