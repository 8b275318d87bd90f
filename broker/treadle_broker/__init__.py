"""Admission, scheduling and the service around them."""

from treadle_broker.embedded import ContinuousBatchScheduler, SchedulerStalled, SessionOutput
from treadle_broker.plan import Emitted, Event, Finished, Plan, Promoted, Rebuilding
from treadle_broker.scheduler import Scheduler
from treadle_broker.session import Job, SessionKey
from treadle_broker.sweep import run_concurrency_sweep
from treadle_shared.concurrency import ConcurrencyResult, ConcurrencySweep

__all__ = [
    "ConcurrencyResult",
    "ConcurrencySweep",
    "ContinuousBatchScheduler",
    "Emitted",
    "Event",
    "Finished",
    "Job",
    "Plan",
    "Promoted",
    "Rebuilding",
    "Scheduler",
    "SchedulerStalled",
    "SessionKey",
    "SessionOutput",
    "run_concurrency_sweep",
]
