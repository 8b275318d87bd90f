"""Treadle beside other servers of the same models, under the same load; ``benchmarks/compare.py`` is the command."""
