"""What an operator may ask of a node, through its control endpoint."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, Self

from treadle._call import Call
from treadle._core import Core
from treadle._link import Link
from treadle._options import CALL_TIMEOUT_S
from treadle_shared.rundir import find_runtime_dir

CONTROL_TIMEOUT_S: Final = 2.0  # an operator asks of a node that is there; it answers in milliseconds


class Control:
    """A connection to the control endpoint of a node. Raises Unavailable where no broker answers in time."""

    def __init__(
        self, runtime_dir: str | os.PathLike[str] | None = None, *, timeout: float = CONTROL_TIMEOUT_S
    ) -> None:
        directory = find_runtime_dir(runtime_dir)
        self._link = Link(directory.control, str(directory.path))
        try:
            self._link.wait_open(timeout)
        except BaseException:
            self._link.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Disconnect. Idempotent."""
        self._link.close()

    def status(self, *, timeout: float = CALL_TIMEOUT_S) -> dict[str, Any]:
        """How the node stands, as Client.status."""
        return self._facts(lambda core: core.ask("status"), timeout)

    def sessions(self, *, timeout: float = CALL_TIMEOUT_S) -> dict[str, Any]:
        """The sessions that wait and run, of all clients; never their texts."""
        return self._facts(lambda core: core.ask("sessions"), timeout)

    def cancel(self, session_id: str, epoch: int | None = None, *, timeout: float = CALL_TIMEOUT_S) -> bool:
        """End one session by its exact id, the newest of that id without ``epoch``; False where none runs."""
        found: bool = self._ask(lambda core: core.cancel_by_id(session_id, epoch), timeout).reply.found
        return found

    def drain(self, timeout_s: float | None = None, *, timeout: float = CALL_TIMEOUT_S) -> dict[str, Any]:
        """Tell the node to refuse what is new, finish what runs within ``timeout_s``, and stop.

        Returns when the node has begun.
        """
        return self._facts(lambda core: core.drain(timeout_s), timeout)

    def _facts(self, question: Callable[[Core], Call], timeout: float) -> dict[str, Any]:
        facts: dict[str, Any] = self._ask(question, timeout).reply.facts
        return facts

    def _ask(self, question: Callable[[Core], Call], timeout: float) -> Call:
        return self._link.call(question, timeout)
