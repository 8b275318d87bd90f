"""Runs jobs through the engine's own contract and records every row from which a token is chosen."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from treadle_shared.engine import DecodeItem, PrefillItem, StepResult
from treadle_worker.llama.batch import cut
from treadle_worker.llama.context import Logits
from treadle_worker.llama.engine import LlamaEngine
from treadle_worker.verify.jobs import Job
from treadle_worker.verify.steps import Row, Step


@dataclass(slots=True, eq=False)
class Run:
    """One job in a slot. ``rows`` are in the KV cache; ``steps`` begin with token number ``first``.

    ``replay``: tokens emitted before, still to be run again as forced rows; only the last of them is sampled from.
    """

    job: Job
    slot: int
    epoch: int
    first: int = 0
    rows: int = 0
    steps: list[Step] = field(default_factory=list)
    replay: deque[int] = field(default_factory=deque)

    @property
    def prefilled(self) -> bool:
        """Whether the whole prompt has run."""
        return self.rows >= len(self.job.prompt)

    @property
    def done(self) -> bool:
        """Whether the job's last token is there."""
        return self.first + len(self.steps) > self.job.steps


class Driver:
    """One engine and the runs on it. Takes the engine's ``on_logits``."""

    def __init__(self, engine: LlamaEngine) -> None:
        self._engine = engine
        self._epoch = 0
        self._tapped: dict[int | str, Row] = {}
        engine.on_logits = self._tap

    def open(self, job: Job, slot: int, replay: Iterable[int] = ()) -> Run:
        """A job in a free slot; nothing is run yet. ``replay`` are the first tokens that it emitted before."""
        self._epoch += 1
        emitted = deque(replay)
        return Run(job, slot, self._epoch, first=len(emitted), replay=emitted)

    def cut(self, length: int, limit: int) -> list[int]:
        """Sizes of the chunks, of at most ``limit`` tokens, in which a prompt may run."""
        return cut(length, limit, self._engine.facts.min_prefill_rows)

    def prefill(self, chunks: Sequence[tuple[Run, int]]) -> None:
        """The next so many prompt tokens of each run, as one call of the engine."""
        items = []
        for run, size in chunks:
            tokens = run.job.prompt[run.rows : run.rows + size]
            params = run.job.params if run.rows == 0 else None
            sample = run.rows + size == len(run.job.prompt) and not run.replay
            items.append(PrefillItem(run.slot, run.epoch, run.rows, tokens, sample, 0, params))
        results = self._engine.prefill(items)
        for (run, size), result in zip(chunks, results, strict=True):
            self._ran(run, size, result)

    def prefill_whole(self, run: Run) -> None:
        """A run's prompt in one chunk."""
        self.prefill([(run, len(run.job.prompt))])

    def rebuild(self, run: Run) -> None:
        """A run's prompt, then what it emitted before: as the engine asks for it."""
        if self._engine.facts.replay_decode:
            self.prefill_whole(run)
            return
        emitted = tuple(run.replay)
        run.replay.clear()
        tokens = (*run.job.prompt, *emitted)
        item = PrefillItem(run.slot, run.epoch, 0, tokens, True, len(emitted), run.job.params)
        [result] = self._engine.prefill([item])
        self._ran(run, len(tokens), result)

    def decode(self, runs: Sequence[Run]) -> None:
        """One row of each run as one batch, in the given order."""
        items = []
        for run in runs:
            sample = len(run.replay) <= 1
            token = run.replay.popleft() if run.replay else None
            items.append(DecodeItem(run.slot, run.epoch, run.rows, token, sample))
        for run, result in zip(runs, self._engine.decode_batch(items), strict=True):
            self._ran(run, 1, result)

    def decode_to_end(self, runs: Sequence[Run]) -> None:
        """Decode in one batch until every run is done; a run that is done leaves it."""
        while live := [run for run in runs if not run.done]:
            self.decode(live)

    def close(self, runs: Iterable[Run]) -> None:
        """Give the runs' slots back."""
        for run in runs:
            self._engine.release(run.slot, run.epoch)

    def _ran(self, run: Run, rows: int, result: StepResult) -> None:
        assert not result.cache_miss, f"slot {run.slot} was lost"
        run.rows += rows
        if result.token is not None:
            run.steps.append(Step(self._tapped.pop(run.slot), result.token, result.logprobs))

    def _tap(self, sessions: list[int | str], logits: Logits) -> None:
        for session, row in zip(sessions, logits, strict=True):
            self._tapped[session] = np.array(row)
