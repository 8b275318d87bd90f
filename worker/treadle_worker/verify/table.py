"""A proof as a table that grows by a line a case."""

from __future__ import annotations

from typing import Final

from treadle_worker.verify.report import CaseResult

_NAME: Final = 48  # characters of the widest case name

HEADER: Final = f"{'case':{_NAME}} {'prompts':>7} {'outputs':>7} {'equal':>7} {'seconds':>7}  first difference"


def line(case: CaseResult) -> str:
    """One case."""
    if case.skipped:
        return f"{case.name:{_NAME}} {'-':>7} {'-':>7} {'-':>7} {case.seconds:7.1f}  not run: {case.skipped}"
    return (
        f"{case.name:{_NAME}} {case.prompts:7} {case.outputs:7} {case.equal:7} {case.seconds:7.1f}  "
        f"{case.first or ('none' if case.exact else 'nothing was compared')}"
    )
