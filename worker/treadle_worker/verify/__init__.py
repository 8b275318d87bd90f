"""The long proof that a sequence's outputs do not depend on what runs beside it."""

from treadle_worker.verify.command import main
from treadle_worker.verify.proof import Proof
from treadle_worker.verify.report import CaseResult, Report

__all__ = ["CaseResult", "Proof", "Report", "main"]
