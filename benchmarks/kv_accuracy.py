"""What the KV cache's number types cost in accuracy.

``python benchmarks/kv_accuracy.py MODEL… [--tokens 1000] [--windows 3]``

For every pair of types, the Kullback-Leibler divergence (nats) of the next token's distribution from that with a cache
of f32 and without flash attention, its 99th percentile, and how often the likeliest token is the same. The text is
that of this project's documents.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from treadle_worker.llama.kv_types import GGML_TYPES
from treadle_worker.llama.library import Library, load_library

Distribution = npt.NDArray[np.float32]
"""Natural-log probabilities, shape (tokens, n_vocab)."""

OFF, ON = 0, 1  # enum llama_flash_attn_type
LARGE, SMALL = 512, 32  # micro-batches; 64 rows of a sequence and more may go in tiles
REFERENCE: Final = ("f32", "f32", OFF, LARGE)
CASES: Final = {
    "f16, no flash attention": ("f16", "f16", OFF, LARGE),
    "f16, tiled": ("f16", "f16", ON, LARGE),
    "f16, row by row": ("f16", "f16", ON, SMALL),
    "bf16 keys, f16 values": ("bf16", "f16", ON, LARGE),
    "f16 keys, f32 values": ("f16", "f32", ON, LARGE),
    "bf16": ("bf16", "bf16", ON, LARGE),
    "q8_0": ("q8_0", "q8_0", ON, LARGE),
}
DOCUMENTS: Final = Path(__file__).parents[1] / "docs"


class Model:
    """A model, and the windows of a text that it reads."""

    def __init__(self, library: Library, path: Path, tokens: int, windows: int) -> None:
        self._api = library.api
        self._handle = self._api.llama_model_load_from_file(str(path).encode(), self._api.llama_model_default_params())
        if not self._handle:
            raise SystemExit(f"{path}: cannot be loaded")
        self._vocab = self._api.llama_model_get_vocab(self._handle)
        self._n_vocab: int = self._api.llama_vocab_n_tokens(self._vocab)
        text = self._tokens("".join(page.read_text() for page in sorted(DOCUMENTS.glob("*.md"))))
        if len(text) < tokens * windows:
            raise SystemExit(f"the text has {len(text)} tokens, {tokens * windows} are asked for")
        self._windows = [text[number * tokens : (number + 1) * tokens] for number in range(windows)]

    def read(self, key: str, value: str, flash: int, ubatch: int) -> Distribution:
        """The distributions after every token of every window."""
        params = self._api.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_outputs_max = len(self._windows[0])
        params.n_ubatch, params.flash_attn_type = ubatch, flash
        params.type_k, params.type_v = GGML_TYPES[key], GGML_TYPES[value]
        context = self._api.llama_init_from_model(self._handle, params)
        found = np.concatenate([self._distributions(context, window) for window in self._windows])
        self._api.llama_free(context)
        return found

    def _distributions(self, context: Any, window: npt.NDArray[np.int32]) -> Distribution:
        batch = self._api.llama_batch_init(len(window), 0, 1)
        batch.n_tokens = len(window)
        for row, token in enumerate(window.tolist()):
            batch.token[row], batch.pos[row], batch.logits[row] = token, row, 1
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, 0
        self._api.llama_memory_clear(self._api.llama_get_memory(context), True)
        if self._api.llama_decode(context, batch) != 0:
            raise SystemExit("llama_decode failed")
        shape = (len(window), self._n_vocab)
        logits = np.ctypeslib.as_array(self._api.llama_get_logits(context), shape).astype(np.float64)
        self._api.llama_batch_free(batch)
        logits -= logits.max(axis=1, keepdims=True)
        return (logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))).astype(np.float32)

    def _tokens(self, text: str) -> npt.NDArray[np.int32]:
        data = text.encode()
        tokens = (self._api.llama_token * (len(data) + 2))()
        count = self._api.llama_tokenize(self._vocab, data, len(data), tokens, len(tokens), True, False)
        return np.asarray(tokens[:count], np.int32)


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL")
    parser.add_argument("--tokens", type=int, default=1000, help="of a window (default: 1000)")
    parser.add_argument("--windows", type=int, default=3, help="how many (default: 3)")
    options = parser.parse_args()
    library = load_library()
    for path in options.models:
        model = Model(library, path, options.tokens, options.windows)
        reference = model.read(*REFERENCE)
        weights = np.exp(reference)
        print(f"{path.name}\n{'KV cache':26} {'mean':>9} {'p99':>9}  same token")
        for name, case in CASES.items():
            found = model.read(*case)
            divergence = (weights * (reference - found)).sum(axis=1)
            same = (found.argmax(axis=1) == reference.argmax(axis=1)).mean()
            print(f"{name:26} {divergence.mean():9.1e} {np.quantile(divergence, 0.99):9.1e} {same:11.4f}")


if __name__ == "__main__":
    main()
