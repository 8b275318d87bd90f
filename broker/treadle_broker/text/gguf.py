"""llama.cpp's vocabulary of a GGUF file, loaded without weights."""

from __future__ import annotations

import ctypes
import functools
import re
from array import array
from pathlib import Path
from typing import Any, Final

from treadle_shared.errors import ModelError
from treadle_shared.modelfile import check_readable
from treadle_shared.vocabprint import tokenizer_fingerprint

_LOG_ERROR: Final = 4  # GGML_LOG_LEVEL_ERROR
_LOG_PREFIX = re.compile(r"^\w+: (error loading model: )?")  # the C function that speaks
_MAX_LOG: Final = 400  # characters of llama.cpp's own reason; a sentence, not its whole log
_TEXT_BUFFER: Final = 4096  # bytes; most metadata fits, longer values are asked for again
_PIECE_BUFFER: Final = 512  # bytes; most pieces are under 20


class _Library:
    """The loaded ``llama_cpp`` module. Its log goes nowhere, except that the first error of a load is kept."""

    def __init__(self) -> None:
        import llama_cpp  # heavy, and absent where only the reference engine runs

        self.api: Any = llama_cpp
        self.first_error = ""
        self._callback = llama_cpp.llama_log_callback(self._log)  # llama.cpp keeps only its address
        llama_cpp.llama_log_set(self._callback, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()

    def _log(self, level: int, text: bytes, _user_data: Any) -> None:
        if level == _LOG_ERROR and not self.first_error:
            line = text.decode("utf-8", "replace").strip()
            self.first_error = _LOG_PREFIX.sub("", line)[:_MAX_LOG]


@functools.cache
def _library() -> _Library:
    """One a process: llama.cpp has one log and one backend."""
    return _Library()


class GgufVocab:
    """The vocabulary and the metadata of one file.

    Raises ModelError where the file is missing, not readable, not GGUF, damaged, or holds no vocabulary.
    """

    def __init__(self, path: Path) -> None:
        check_readable(path)
        try:
            library = _library()
        except ImportError:
            raise ModelError("llama-cpp-python is not installed; a GGUF model needs it") from None
        self._api = library.api
        self._model = _load(library, path)
        self.pointer = self._api.llama_model_get_vocab(self._model)
        self.n_tokens = int(self._api.llama_vocab_n_tokens(self.pointer))
        if self.n_tokens == 0:
            self.close()
            raise ModelError(f"{path}: holds no vocabulary")

    def close(self) -> None:
        """Free the model; the vocabulary must not be used afterwards."""
        if self._model is not None:
            self._api.llama_model_free(self._model)
            self._model = None

    def metadata(self) -> dict[str, str]:
        """Every key-value pair as text; arrays in JSON's form. Tokens, merges and the like are not among them."""
        pairs = {}
        for index in range(self._api.llama_model_meta_count(self._model)):
            key = self._text(self._api.llama_model_meta_key_by_index, index)
            pairs[key] = self._text(self._api.llama_model_meta_val_str_by_index, index)
        return pairs

    def special(self, name: str) -> int:
        """The id of a special token, ``bos`` or ``eos``; -1 where there is none."""
        return int(getattr(self._api, f"llama_vocab_{name}")(self.pointer))

    def adds(self, name: str) -> bool:
        """Whether the model wants ``bos`` before or ``eos`` after every text."""
        return bool(getattr(self._api, f"llama_vocab_get_add_{name}")(self.pointer))

    def is_bpe(self) -> bool:
        """Whether texts are cut by regular expressions before they are merged."""
        return bool(self._api.llama_vocab_type(self.pointer) == self._api.LLAMA_VOCAB_TYPE_BPE)

    def fingerprint(self) -> str:
        """What identifies how this vocabulary tokenises."""
        return tokenizer_fingerprint(self._api, self.pointer)

    def text(self, token: int) -> bytes:
        """A token's text as the file writes it."""
        return self._api.llama_vocab_get_text(self.pointer, token) or b""

    def eog(self) -> frozenset[int]:
        """Every token that ends an answer."""
        is_eog = self._api.llama_vocab_is_eog
        return frozenset(token for token in range(self.n_tokens) if is_eog(self.pointer, token))

    def with_attributes(self, *names: str) -> list[int]:
        """The tokens that carry at least one of llama.cpp's attributes, such as ``CONTROL``."""
        mask = sum(getattr(self._api, f"LLAMA_TOKEN_ATTR_{name}") for name in names)
        attributes = self._api.llama_vocab_get_attr
        return [token for token in range(self.n_tokens) if attributes(self.pointer, token) & mask]

    def pieces(self) -> list[bytes]:
        """What each token adds to a text, by id; control tokens add nothing."""
        buffer = ctypes.create_string_buffer(_PIECE_BUFFER)
        return [self._piece(token, buffer) for token in range(self.n_tokens)]

    def tokenize(self, text: bytes, special: bool) -> array[int]:
        """The ids of one text with nothing added at its ends. Other threads run meanwhile."""
        size = len(text) + 16  # no token is shorter than a byte; a space may be put before the text
        buffer = (ctypes.c_int32 * size)()
        count = self._api.llama_tokenize(self.pointer, text, len(text), buffer, size, False, special)
        if count < 0:
            size = -count
            buffer = (ctypes.c_int32 * size)()
            count = self._api.llama_tokenize(self.pointer, text, len(text), buffer, size, False, special)
        tokens = array("i")
        tokens.frombytes(memoryview(buffer).cast("B")[: 4 * count])
        return tokens

    def _piece(self, token: int, buffer: ctypes.Array[ctypes.c_char]) -> bytes:
        length = self._api.llama_token_to_piece(self.pointer, token, buffer, len(buffer), 0, False)
        if length < 0:
            return self._piece(token, ctypes.create_string_buffer(-length))
        return buffer.raw[:length]

    def _text(self, ask: Any, index: int) -> str:
        """A metadata text; ``ask`` answers with the length it needs, like snprintf."""
        buffer = ctypes.create_string_buffer(_TEXT_BUFFER)
        needed = ask(self._model, index, buffer, len(buffer))
        if needed >= len(buffer):
            buffer = ctypes.create_string_buffer(needed + 1)
            ask(self._model, index, buffer, len(buffer))
        return buffer.value.decode("utf-8", "replace")


def _load(library: _Library, path: Path) -> Any:
    params = library.api.llama_model_default_params()
    params.vocab_only = True
    no_devices = (ctypes.c_void_p * 1)()  # an empty list; asking a GPU for its memory would already take some of it
    params.devices = ctypes.cast(no_devices, ctypes.c_void_p)
    library.first_error = ""
    model = library.api.llama_model_load_from_file(str(path).encode(), params)
    if model is None:
        reason = f" ({library.first_error})" if library.first_error else ""
        raise ModelError(f"{path}: is damaged, incomplete or of an unsupported kind{reason}")
    return model
