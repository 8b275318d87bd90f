"""What the engine thread is doing, for the I/O thread to see."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from treadle_worker.engines import OpenEngine


@dataclass(slots=True)
class WorkerStatus:
    """Each attribute is written by one thread and read by the other, whole, so no lock is needed.

    The engine thread writes ``phase``, ``load``, ``progress`` (ticks finished), ``tick_started`` (monotonic
    seconds; None while idle), ``offer`` (set when ready), ``ended``, and ``failure`` (why it ended unasked).
    The I/O thread writes ``broker_id`` (whose ticks to run; empty for nobody's) and ``draining``.
    """

    phase: str = "loading"
    load: float = 0.0
    progress: int = 0
    tick_started: float | None = None
    offer: OpenEngine | None = None
    ended: bool = False
    failure: BaseException | None = None
    broker_id: str = ""
    draining: bool = False
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
