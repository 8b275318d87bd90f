"""One loaded GGUF: its weights, vocabulary and what its metadata says."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from treadle_shared.config import NodeConfig
from treadle_shared.errors import ConfigError, ModelError, WeightBudgetError
from treadle_shared.vocabprint import tokenizer_fingerprint
from treadle_worker.llama.devices import Device, choose_devices
from treadle_worker.llama.gguf import inspect_model
from treadle_worker.llama.kv_types import choose_kv_types
from treadle_worker.llama.library import Library
from treadle_worker.llama.switches import SwitchChoice, obstacles

_MAX_VALUE: Final = 1024  # bytes of a metadata value read here: names and numbers
_MAX_TEXT: Final = 256  # bytes of llama.cpp's one-line description of a model


class LlamaModel:
    """Loads on construction; ``close`` frees it.

    ``choose`` decides the kernel switches from the types of weights and KV; ``switches`` are those in effect.
    ``keeps_roles``: for exact numerics prompt tokens must run two or more at a time, and emitted ones alone.
    ``on_progress`` is called with the loaded fraction in [0, 1]. ``weight_bytes`` is what the tensors take,
    ``ctx_train`` the context the model was trained for, ``eog`` its end-of-generation tokens. ``can_copy``: its
    memory is a cache of tokens, of which a prefix can be taken; a recurrent state cannot be cut.

    Raises ModelError (missing, damaged, not a generative model), WeightBudgetError, or ConfigError for the
    device settings.
    """

    def __init__(
        self, library: Library, config: NodeConfig, choose: SwitchChoice, on_progress: Callable[[float], None]
    ) -> None:
        if not config.model:
            raise ConfigError("model", "must be the path of a GGUF file")
        self.library = library
        self.path = Path(config.model)
        self.devices = choose_devices(library, config)
        self.summary = inspect_model(library, self.path)
        _check_budget(self.summary.weight_bytes, config)
        exact = config.effective_numerics == "exact"
        self.kv_types = choose_kv_types(exact, config.kv_type, bool(self.devices))
        self.switches = library.settle(choose(exact, self.summary.weight_types, self.kv_types))
        self.keeps_roles = exact and not self.switches.flash_attention
        self.handle = self._load(config.n_gpu_layers, on_progress)
        try:
            self._read()
            _check_budget(self.weight_bytes, config)
        except Exception:
            self.close()
            raise

    def close(self) -> None:
        """Free the weights. The contexts made of them must be freed before."""
        if self.handle is not None:
            self.library.api.llama_model_free(self.handle)
            self.handle = None

    @property
    def obstacles(self) -> list[str]:
        """What is known to keep this model from being exact as it runs here."""
        return obstacles(self.switches, self.summary.weight_types, self.kv_types, self.library.tiny_blas)

    def metadata(self, key: str) -> str:
        """A metadata value as text; empty where the file has none."""
        value = ctypes.create_string_buffer(_MAX_VALUE)
        length = self.library.api.llama_model_meta_val_str(self.handle, key.encode(), value, _MAX_VALUE)
        return value.value.decode("utf-8", "replace") if length >= 0 else ""

    def fingerprint_tokenizer(self) -> str:
        """See ``treadle_shared.vocabprint``."""
        return tokenizer_fingerprint(self.library.api, self.vocab)

    def _load(self, n_gpu_layers: int, on_progress: Callable[[float], None]) -> Any:
        api, log = self.library.api, self.library.log
        callback = api.llama_progress_callback(_progress_callback(on_progress))
        handles = _device_list(self.devices)
        params = api.llama_model_default_params()
        params.n_gpu_layers = n_gpu_layers
        params.devices = ctypes.cast(handles, ctypes.c_void_p)
        params.use_extra_bufts = self.switches.repacked_weights
        params.progress_callback = callback
        log.forget_errors()
        handle = api.llama_model_load_from_file(os.fsencode(self.path), params)
        if not handle:
            raise ModelError(f"{self.path}: cannot be loaded: {log.last_error or 'llama.cpp gives no reason'}")
        return handle

    def _read(self) -> None:
        api = self.library.api
        self.vocab = api.llama_model_get_vocab(self.handle)
        self.n_vocab: int = api.llama_vocab_n_tokens(self.vocab)
        self.weight_bytes: int = api.llama_model_size(self.handle)
        self.ctx_train: int = api.llama_model_n_ctx_train(self.handle)
        self.can_copy = not (api.llama_model_is_recurrent(self.handle) or api.llama_model_is_hybrid(self.handle))
        text = ctypes.create_string_buffer(_MAX_TEXT)
        api.llama_model_desc(self.handle, text, _MAX_TEXT)
        self.description = text.value.decode("utf-8", "replace")
        self._refuse_unsuitable()
        is_eog = api.llama_vocab_is_eog
        self.eog = frozenset(token for token in range(self.n_vocab) if is_eog(self.vocab, token))

    def _refuse_unsuitable(self) -> None:
        """Only a causal decoder with a vocabulary generates text a token at a time."""
        api, architecture = self.library.api, self.metadata("general.architecture")
        pooling = self.metadata(f"{architecture}.pooling_type")
        causal = self.metadata(f"{architecture}.attention.causal")
        if pooling not in ("", "0") or causal == "false":
            raise ModelError(f"{self.path}: is an embedding model ({architecture}); it cannot generate text")
        if api.llama_model_has_encoder(self.handle) or not api.llama_model_has_decoder(self.handle):
            raise ModelError(f"{self.path}: {architecture} needs an encoder; only decoders can be served")
        if api.llama_model_is_diffusion(self.handle):
            raise ModelError(f"{self.path}: is a diffusion model ({architecture}); it does not run token by token")
        if self.n_vocab == 0:
            raise ModelError(f"{self.path}: has no vocabulary")


def _check_budget(weight_bytes: int, config: NodeConfig) -> None:
    if config.weight_bytes is not None and weight_bytes > config.weight_bytes:
        raise WeightBudgetError(weight_bytes, config.weight_bytes)


def _device_list(devices: list[Device]) -> Any:
    """A NULL-terminated array. An empty one keeps llama.cpp on the CPU, where NULL would mean every GPU."""
    return (ctypes.c_void_p * (len(devices) + 1))(*(device.handle for device in devices), None)


def _progress_callback(on_progress: Callable[[float], None]) -> Callable[[float, object], bool]:
    def report(fraction: float, _user_data: object) -> bool:
        on_progress(min(max(fraction, 0.0), 1.0))
        return True  # go on loading

    return report
