"""A supervised node beside the calling program, for as long as a ``with`` block lasts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import IO, Any, Self

from treadle.supervise.prepare import PreparedNode
from treadle.supervise.supervisor import Supervisor


class BackgroundNode:
    """Runs a node's supervisor in a thread; leaving the block drains the node.

    ``output`` gets what broker and worker print; ``say`` and ``on_status`` are called as those of Supervisor.
    """

    def __init__(
        self,
        node: PreparedNode,
        output: IO[bytes],
        say: Callable[[str], None],
        on_status: Callable[[dict[str, Any] | None], None] = lambda facts: None,
    ) -> None:
        self._changed = threading.Condition()
        self._facts: dict[str, Any] | None = None
        self._code: int | None = None
        self._node = node
        self._supervisor = Supervisor(node.directory, node.config.drain_timeout_s, say, self._ready, on_status, output)
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def wait_ready(self) -> dict[str, Any] | None:
        """The node's facts once it is ready; None where it ended instead."""
        with self._changed:
            self._changed.wait_for(lambda: self._facts is not None or self._code is not None)
            return self._facts if self._code is None else None

    def stop(self) -> int:
        """Drain the node; the supervisor's exit code. Idempotent."""
        if self._thread.is_alive():
            self._supervisor.request_stop()
        self._thread.join()
        assert self._code is not None
        return self._code

    def _run(self) -> None:
        code = 1
        try:
            code = self._supervisor.run()
        finally:
            self._node.release()
            with self._changed:
                self._code = code
                self._changed.notify_all()

    def _ready(self, facts: dict[str, Any]) -> None:
        with self._changed:
            self._facts = facts
            self._changed.notify_all()
