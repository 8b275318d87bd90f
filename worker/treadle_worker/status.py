"""What the engine's thread is doing, for the main thread to see, and the other way round."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from treadle_worker.engines import OpenEngine
from treadle_worker.throttle import Throttle


@dataclass(slots=True)
class WorkerStatus:
    """Each attribute is written by one thread and read by the other, whole, so no lock is needed.

    The engine's thread writes ``phase``, ``load``, ``progress`` (ticks finished), ``tick_started`` (monotonic
    seconds; None while idle), ``offer`` (set when ready), ``ignored`` (ticks not taken), ``ended``, and how it ended:
    ``failure``, or else ``exit_code``. The main thread writes ``draining``, and ``orphaned`` when the supervisor has
    died. ``unheard`` is set by either when the broker takes no message, and unset by the engine's thread, which sees
    to it.
    """

    phase: str = "loading"
    load: float = 0.0
    progress: int = 0
    tick_started: float | None = None
    offer: OpenEngine | None = None
    ignored: Throttle = field(default_factory=Throttle)
    ended: bool = False
    failure: BaseException | None = None
    exit_code: int = 0
    draining: bool = False
    orphaned: bool = False
    unheard: bool = False
    born: float = field(default_factory=time.monotonic)

    def tick_age(self, now: float) -> float:
        """Seconds that the running tick has run; 0 when idle."""
        started = self.tick_started
        return 0.0 if started is None else max(now - started, 0.0)

    # ---- as an Observer of the start

    def on_progress(self, fraction: float) -> None:
        """``fraction`` of the weights, in [0, 1], is loaded."""
        self.load = fraction

    def on_phase(self, phase: str) -> None:
        """The start has reached this phase."""
        self.phase = phase
