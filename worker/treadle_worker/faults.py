"""Faults on purpose: an engine that dies, hangs or fails where a test says so.

Chosen by the ``faults`` setting, a list of rules ``ACTION@TRIGGER`` separated by ``;``.

- actions: ``kill`` (SIGKILL itself), ``segv`` (SIGSEGV itself), ``exit`` (leave with code 1), ``stall`` (never return),
  ``codeN`` (the batch fails with code N, such as ``code-3``)
- triggers: ``token=T`` (a batch with a row of a sequence that holds token T among its first four, so that no emitted
  token counts), ``call=N`` (the N-th call of this engine only), ``every=N`` (each N-th call)
"""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from treadle_shared.engine import (
    BatchEngine,
    CopyingEngine,
    CopyItem,
    DecodeItem,
    EngineFacts,
    ParkingEngine,
    PrefillItem,
    StepResult,
)
from treadle_shared.errors import ConfigError, DecodeFailed

_HEAD: Final = 4  # tokens of a sequence that are looked at
_RULE: Final = re.compile(r"(?P<action>kill|segv|exit|stall|code-?\d+)@(?P<trigger>token|call|every)=(?P<number>\d+)")


@dataclass(frozen=True, slots=True)
class Fault:
    """One rule."""

    action: str
    trigger: str
    number: int

    def fires(self, call: int, marked: bool) -> bool:
        """Whether it strikes at call number ``call`` (from 1); ``marked``: a sequence of the batch holds its token."""
        if self.trigger == "token":
            return marked
        return call == self.number if self.trigger == "call" else call % self.number == 0

    def strike(self) -> None:
        """Do it. Raises DecodeFailed where that is the fault."""
        if self.action == "stall":
            threading.Event().wait()
        if self.action.startswith("code"):
            raise DecodeFailed(int(self.action.removeprefix("code")), "a fault on purpose")
        if self.action == "exit":
            os._exit(1)
        os.kill(os.getpid(), signal.SIGKILL if self.action == "kill" else signal.SIGSEGV)


def parse_faults(text: str) -> list[Fault]:
    """The rules of a ``faults`` setting. Raises ConfigError for ``faults``."""
    faults = []
    for part in filter(None, text.split(";")):
        match = _RULE.fullmatch(part.strip())
        if match is None or (match["trigger"] != "token" and int(match["number"]) == 0):
            raise ConfigError("faults", f"{part.strip()!r} is not ACTION@TRIGGER")
        faults.append(Fault(match["action"], match["trigger"], int(match["number"])))
    return faults


class FaultyEngine:
    """A BatchEngine around another one, with faults."""

    def __init__(self, engine: BatchEngine, faults: Sequence[Fault]) -> None:
        self._engine = engine
        self._faults = faults
        self._calls = 0
        self._prompts: dict[tuple[int | str, int], set[int]] = {}

    @property
    def recipe_fingerprint(self) -> str:
        """The wrapped engine's: faults change no token."""
        return self._engine.recipe_fingerprint

    @property
    def facts(self) -> EngineFacts:
        """The wrapped engine's."""
        return self._engine.facts

    @property
    def kv_tokens(self) -> int:
        """The wrapped engine's."""
        return self._engine.kv_tokens

    @property
    def last_timings(self) -> Any:
        """The wrapped engine's."""
        return getattr(self._engine, "last_timings", (0.0, 0.0))

    def prefill(self, items: Sequence[PrefillItem]) -> list[StepResult]:
        """See BatchEngine."""
        for item in items:
            head = item.tokens[: max(_HEAD - item.start, 0)]
            self._prompts.setdefault((item.session, item.epoch), set()).update(head)
        self._strike(items)
        return self._engine.prefill(items)

    def decode_batch(self, items: Sequence[DecodeItem]) -> list[StepResult]:
        """See BatchEngine."""
        self._strike(items)
        return self._engine.decode_batch(items)

    def copy(self, item: CopyItem) -> bool:
        """See CopyingEngine: the first tokens come along."""
        if item.rows >= _HEAD:  # blocks are longer
            self._prompts[item.session, item.epoch] = set(self._prompts.get((item.source, item.source_epoch), ()))
        return cast(CopyingEngine, self._engine).copy(item)

    def release(self, session: int | str, epoch: int) -> None:
        """See BatchEngine."""
        self._prompts.pop((session, epoch), None)
        self._engine.release(session, epoch)

    def park(self, session: int | str, epoch: int) -> bool:
        """See ParkingEngine."""
        assert isinstance(self._engine, ParkingEngine)
        return self._engine.park(session, epoch)

    def restore(self, session: int | str, epoch: int, new_session: int | str, new_epoch: int) -> bool:
        """See ParkingEngine."""
        assert isinstance(self._engine, ParkingEngine)
        self._prompts[new_session, new_epoch] = self._prompts.pop((session, epoch), set())
        return self._engine.restore(session, epoch, new_session, new_epoch)

    @property
    def parked_bytes(self) -> int:
        """See ParkingEngine."""
        return getattr(self._engine, "parked_bytes", 0)

    def close(self) -> None:
        """Close the wrapped engine where it can be closed."""
        close = getattr(self._engine, "close", None)
        if close is not None:
            close()

    def _strike(self, items: Sequence[PrefillItem | DecodeItem]) -> None:
        self._calls += 1
        held = [self._prompts.get((item.session, item.epoch), set()) for item in items]
        for fault in self._faults:
            if fault.fires(self._calls, any(fault.number in tokens for tokens in held)):
                fault.strike()
