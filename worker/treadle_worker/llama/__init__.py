"""The llama.cpp engine."""

from treadle_worker.llama.engine import LlamaEngine

__all__ = ["LlamaEngine"]
