"""Values, messages and protocols that the broker, the worker and the client share."""

from treadle_shared.admission import AdmissionDecision, AdmissionReason
from treadle_shared.budget import NodeBudget
from treadle_shared.config import NodeConfig, load_config
from treadle_shared.engine import (
    BatchEngine,
    CopyingEngine,
    CopyItem,
    DecodeItem,
    EngineFacts,
    PrefillItem,
    StepResult,
    TokenLogprobs,
)
from treadle_shared.outcome import DoneReason
from treadle_shared.request import GenerationRequest
from treadle_shared.runner import TickRunner
from treadle_shared.sampling import SamplingParams
from treadle_shared.telemetry import SchedulerTelemetry

__all__ = [
    "AdmissionDecision",
    "AdmissionReason",
    "BatchEngine",
    "CopyItem",
    "CopyingEngine",
    "DecodeItem",
    "DoneReason",
    "EngineFacts",
    "GenerationRequest",
    "NodeBudget",
    "NodeConfig",
    "PrefillItem",
    "SamplingParams",
    "SchedulerTelemetry",
    "StepResult",
    "TickRunner",
    "TokenLogprobs",
    "load_config",
]
