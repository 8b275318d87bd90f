"""One llama.cpp context: KV cache, compute buffers, and the calls that run rows through them."""

from __future__ import annotations

import ctypes
import re
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from treadle_shared.config import NodeConfig
from treadle_shared.errors import DecodeFailed, ModelError
from treadle_worker.llama.batch import Batch
from treadle_worker.llama.kv_types import GGML_TYPES
from treadle_worker.llama.model import LlamaModel

Logits = npt.NDArray[np.float32]
State = npt.NDArray[np.uint8]

MIN_EXACT_UBATCH: Final = 3  # three rows can be cut into pieces of two and more; two cannot hold an odd prompt
_CONTEXT_STEP: Final = 256  # llama.cpp pads every sequence's context to this many tokens
_FLASH_AUTO, _FLASH_OFF = -1, 0  # enum llama_flash_attn_type
_BUFFER_LINE: Final = re.compile(r"compute buffer size\s*=\s*([0-9.]+) MiB")

CANNOT_TRIM: Final = -100  # no code of llama.cpp's own
_CANNOT_LOAD: Final = -101

_FAILURES: Final = {
    1: "no room in the KV cache",
    2: "aborted",
    -1: "invalid batch",
    -2: "out of memory for the computation",
    -3: "the computation failed",
}


class LlamaContext:
    """Holds ``max_sequences`` sequences of ``tokens_per_sequence`` tokens; ``close`` frees it. ``max_sessions`` of them
    are for sessions, the others for what is kept of ended ones.

    A sequence's place is llama.cpp's number for it. Attention and the layout of the KV cache follow the model's
    switches. Raises ModelError where the context cannot be made.
    """

    def __init__(self, model: LlamaModel, config: NodeConfig, threads: int) -> None:
        self.model = model
        self._api = model.library.api
        self.max_sessions = config.effective_slots
        self.max_sequences = config.effective_slots + (config.effective_cache_slots if model.can_copy else 0)
        model.library.computes_with(threads)
        with model.library.log.recorded() as lines:
            self._handle = self._make(config, threads)
        self.compute_bytes = sum(_buffer_bytes(line) for line in lines)
        self._memory = self._api.llama_get_memory(self._handle)
        self._copying: set[int] = set()  # places that the next batch copies out of or into
        self._arriving: set[int] = set()  # those of them that it copies into
        if not self._memory:
            self.close()
            raise ModelError(f"{model.path}: has no KV memory; it cannot generate text")
        self.n_batch: int = self._api.llama_n_batch(self._handle)
        self.n_ubatch: int = self._api.llama_n_ubatch(self._handle)
        self.tokens_per_sequence: int = self._api.llama_n_ctx_seq(self._handle)
        self.batch = Batch(self._api, self.n_batch, self.max_sequences)
        self._logits: tuple[int, Logits] = (0, np.empty((0, 0), np.float32))

    def close(self) -> None:
        """Free the KV cache and the buffers."""
        if self._handle is not None:
            self._api.llama_free(self._handle)
            self._handle = None

    def run(self, rows: int, outputs: int) -> Logits:
        """Run the first ``rows`` rows of ``batch``; the logits of the ``outputs`` flagged ones, in row order.

        Shape (outputs, n_vocab), a view that the next call overwrites. Raises DecodeFailed.
        """
        assert rows <= self.n_batch, f"{rows} rows exceed the batch of {self.n_batch}"  # llama.cpp would abort
        self.batch.struct.n_tokens = rows
        log = self.model.library.log
        log.forget_errors()
        self.model.library.working()
        code = self._api.llama_decode(self._handle, self.batch.struct)
        if code != 0:
            problem = _FAILURES.get(code, "unknown failure")
            raise DecodeFailed(code, f"{problem}: {log.last_error}" if log.last_error else problem)
        self._copying.clear()
        self._arriving.clear()
        pointer = self._api.llama_get_logits(self._handle)  # waits for the device
        return self._view(pointer)[:outputs] if outputs else self._logits[1][:0]

    def fill(self, place: int, start: int, tokens: npt.ArrayLike, row: int = 0) -> int:
        """Put a run of one sequence's tokens at ``row`` and after, without outputs; the row after the last."""
        values = np.asarray(tokens, np.int32)
        rows = slice(row, row + len(values))
        self.batch.token[rows] = values
        self.batch.pos[rows] = np.arange(start, start + len(values), dtype=np.int32)
        self.batch.output[rows] = 0
        self.batch.assign(rows, place)
        return rows.stop

    def forget(self, place: int) -> None:
        """Give one sequence's KV back."""
        self._arriving.discard(place)
        self._api.llama_memory_seq_rm(self._memory, place, -1, -1)

    def forget_all(self) -> None:
        """Empty the KV cache; its contents may stay in memory as garbage."""
        self._api.llama_memory_clear(self._memory, False)

    def length(self, place: int) -> int:
        """How many tokens the KV cache holds for a sequence, by its highest position."""
        return int(self._api.llama_memory_seq_pos_max(self._memory, place)) + 1

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Let ``target``, which must be empty, start with the first ``length`` tokens of ``source``.

        The cache is copied whole and then trimmed: in the split layout llama.cpp copies nothing less. It does so when
        the next batch runs.
        """
        self._copying |= {source, target}
        self._arriving.add(target)
        self._api.llama_memory_seq_cp(self._memory, source, target, -1, -1)
        self.trim(target, length)

    def move(self, source: int, target: int) -> None:
        """Let the empty ``target`` hold what ``source`` holds, which is empty then. llama.cpp copies the whole cache of
        one sequence, in the split layout, when the next batch runs.
        """
        self._copying |= {source, target}
        self._arriving.add(target)
        self._api.llama_memory_seq_cp(self._memory, source, target, -1, -1)
        self.forget(source)

    def begins(self, place: int) -> bool:
        """Whether a sequence still holds its first token: a sliding window may have dropped it."""
        return int(self._api.llama_memory_seq_pos_min(self._memory, place)) == 0

    def trim(self, place: int, length: int) -> None:
        """Forget what a sequence holds after its first ``length`` tokens. Raises DecodeFailed where the model's
        memory cannot.
        """
        if not self._api.llama_memory_seq_rm(self._memory, place, length, -1):
            raise DecodeFailed(CANNOT_TRIM, f"place {place}: this model's memory cannot be trimmed")

    def state_bytes(self, place: int) -> int:
        """Bytes that saving one sequence's state would take."""
        return int(self._api.llama_state_seq_get_size(self._handle, place))

    def incomplete(self, place: int) -> bool:
        """Whether the beginning of a place's sequence is still to be copied there, when the next batch runs."""
        return place in self._arriving

    def save_state(self, place: int) -> State:
        """One sequence's KV, to be put back by ``load_state`` into any place. Raises MemoryError."""
        state: State = np.empty(self.state_bytes(place), np.uint8)  # neither zeroed first nor copied afterwards
        written = self._api.llama_state_seq_get_data(self._handle, _bytes_of(state), len(state), place)
        return state[:written]

    def load_state(self, place: int, state: State) -> None:
        """Put a saved KV into an empty place. Raises DecodeFailed where it does not fit."""
        if place in self._copying:
            self._copy_now(place)
        if not self._api.llama_state_seq_set_data(self._handle, _bytes_of(state), len(state), place):
            raise DecodeFailed(_CANNOT_LOAD, f"place {place}: the saved state cannot be put back")

    def _copy_now(self, place: int) -> None:
        """What was to be copied out of an empty place, or into it, must be copied before the place is filled: a batch
        of one row, in the place itself, makes llama.cpp do it.
        """
        self.run(self.fill(place, 0, [0]), 0)
        self.forget(place)

    def _make(self, config: NodeConfig, threads: int) -> Any:
        params = self._params(config, threads)
        log = self.model.library.log
        log.forget_errors()
        handle = self._api.llama_init_from_model(self.model.handle, params)
        if not handle:
            reason = log.last_error or "llama.cpp gives no reason"
            raise ModelError(f"{self.model.path}: no context of {params.n_ctx} tokens can be made: {reason}")
        return handle

    def _params(self, config: NodeConfig, threads: int) -> Any:
        params = self._api.llama_context_default_params()
        tokens = min(config.session_tokens, self.model.ctx_train or config.session_tokens)
        params.n_ctx = -(-tokens // _CONTEXT_STEP) * _CONTEXT_STEP * self.max_sequences
        params.n_seq_max = self.max_sequences
        params.n_ubatch = max(config.ubatch_tokens, MIN_EXACT_UBATCH)
        params.n_batch = max(params.n_ubatch, self.max_sequences)  # a decode batch of every sequence must fit
        params.n_outputs_max = self.max_sequences  # one logits row a sequence; the default reserves one a token
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = _FLASH_AUTO if self.model.switches.flash_attention else _FLASH_OFF
        params.kv_unified = self.model.switches.unified_kv
        params.type_k = GGML_TYPES[self.model.kv_types.key]
        params.type_v = GGML_TYPES[self.model.kv_types.value]
        params.offload_kqv = params.op_offload = bool(self.model.devices)
        return params

    def _view(self, pointer: Any) -> Logits:
        """The logits buffer as an array; llama.cpp keeps it in place, so the array is made once."""
        address = ctypes.addressof(pointer.contents)
        if address != self._logits[0]:
            shape = (self.max_sequences, self.model.n_vocab)
            buffer = (ctypes.c_float * (shape[0] * shape[1])).from_address(address)
            self._logits = (address, np.frombuffer(memoryview(buffer), np.float32).reshape(shape))
        return self._logits[1]


def _bytes_of(state: State) -> Any:
    return state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))


def _buffer_bytes(line: str) -> int:
    match = _BUFFER_LINE.search(line)
    return int(float(match[1]) * (1 << 20)) if match else 0
