"""The thread that owns the engine: the only one that touches the model and its KV cache."""

from __future__ import annotations

import gc
from contextvars import copy_context
from threading import Thread

from treadle_shared.config import NodeConfig
from treadle_worker.bell import Bell
from treadle_worker.engines import open_engine
from treadle_worker.link import BrokerLink
from treadle_worker.serving import Serving
from treadle_worker.status import WorkerStatus


class EngineThread(Thread):
    """Loads the engine, then serves a broker with it.

    What it does is in ``status``, with why it ended; the bell rings when the engine is ready and when the thread ends.
    """

    def __init__(self, config: NodeConfig, worker_id: str, status: WorkerStatus, link: BrokerLink, bell: Bell) -> None:
        super().__init__(name="engine", daemon=True)  # a thread inside llama.cpp cannot be joined
        self._config = config
        self._worker_id = worker_id
        self._status = status
        self._link = link
        self._bell = bell
        self._context = copy_context()  # what every log line of this process says

    def run(self) -> None:
        """The thread's body."""
        try:
            self._context.run(self._live)
        except BaseException as error:  # the main thread decides what becomes of it
            self._status.failure = error
        finally:
            self._status.tick_started = None
            self._status.ended = True
            self._bell.ring()

    def _live(self) -> None:
        opened = open_engine(self._config, self._status)
        try:
            gc.collect()
            gc.freeze()  # what a start leaves behind stays: no tick waits while it is looked through again
            self._status.load = 1.0
            self._status.phase = "ready"
            self._status.offer = opened
            self._bell.ring()
            self._status.exit_code = Serving(self._config, self._worker_id, opened, self._status, self._link).run()
        finally:
            opened.close()
