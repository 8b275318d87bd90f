"""From command line to exit code: 0 where exactness holds in every row, 1 where not, 78 for a model that cannot run."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from treadle_shared.config import NodeConfig, load_config
from treadle_shared.errors import EXIT_CONFIG
from treadle_worker.engines import START_ERRORS
from treadle_worker.pinning import pin
from treadle_worker.verify.jobs import session_tokens
from treadle_worker.verify.proof import Proof
from treadle_worker.verify.report import CaseResult, Report
from treadle_worker.verify.table import HEADER, line


def main(arguments: Sequence[str]) -> int:
    """Run the proof and print it; the exit code."""
    options = _parse(arguments)
    try:
        config = _read_config(options)
        pin(config.cpus)
        if not options.json:
            print(HEADER, flush=True)
        report = Proof(config, options.quick, _silent if options.json else _print_line).run()
    except START_ERRORS as error:
        print(f"verify: {error}", file=sys.stderr)
        return EXIT_CONFIG
    _print(report, options.json)
    return 0 if report.exact else 1


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "treadle_worker.verify", description="Prove that a model's outputs do not depend on what runs beside them."
    )
    parser.add_argument("--model", required=True, help="the GGUF file")
    parser.add_argument("--threads", type=int, help="CPU threads; by default every usable CPU")
    parser.add_argument("--quick", action="store_true", help="short prompts alone: seconds instead of minutes")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    return parser.parse_args(arguments)


def _read_config(options: argparse.Namespace) -> NodeConfig:
    """The node's settings of the environment (KV type, device, CPUs), with what the proof fixes."""
    flags = {
        "engine": "llama",
        "model": options.model,
        "numerics": "exact",
        "threads": options.threads,
        "session_tokens": session_tokens(options.quick),
        "ubatch_tokens": 512,
    }
    return load_config(None, flags)


def _print_line(case: CaseResult) -> None:
    print(line(case), flush=True)


def _silent(_case: CaseResult) -> None:
    """All is printed at the end."""


def _print(report: Report, as_json: bool) -> None:
    print(json.dumps(report.to_dict()) if as_json else f"\n{report.verdict}", flush=True)
