"""Results on disk: one JSON line for each finished run, so that a comparison goes on where it was stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from comparison.errors import BenchmarkError
from comparison.schedule import RunKey


@dataclass(frozen=True, slots=True)
class Record:
    """What one run found: flat figures by name."""

    key: RunKey
    figures: Mapping[str, Any]


class Records:
    """The results of one suite and case. ``facts``, what all of them share, leads the file.

    Raises BenchmarkError for a file whose facts are others: its figures cannot stand beside new ones.
    """

    def __init__(self, file: Path, facts: Mapping[str, Any]) -> None:
        self.file = file
        self.facts = dict(facts)
        self.records: list[Record] = []
        if file.exists():
            self._read()
        else:
            file.parent.mkdir(parents=True, exist_ok=True)
            self._append({"facts": self.facts})

    @property
    def finished(self) -> set[RunKey]:
        """The runs that need not be done again."""
        return {record.key for record in self.records}

    def add(self, record: Record) -> None:
        """One more result; it is on disk when this returns."""
        self._append({**asdict(record.key), **record.figures})
        self.records.append(record)

    def of(self, load: str, system: str) -> list[Record]:
        """One system's results under one load, by pair."""
        found = [record for record in self.records if (record.key.load, record.key.system) == (load, system)]
        return sorted(found, key=lambda record: record.key.pair)

    def _read(self) -> None:
        text = self.file.read_text()
        if not text.endswith("\n"):  # the machine went down in the middle of a line
            self.file.write_text(text := text[: text.rfind("\n") + 1])
        head, *rest = [json.loads(line) for line in text.splitlines()] or [{}]
        if head.get("facts") != self.facts:
            raise BenchmarkError(
                f"{self.file} holds results of other circumstances ({head.get('facts')}, now {self.facts}); "
                "move it away to begin anew"
            )
        self.records = [_record(line) for line in rest]

    def _append(self, line: Mapping[str, Any]) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _record(line: dict[str, Any]) -> Record:
    key = RunKey(line.pop("load"), line.pop("system"), line.pop("pair"))
    return Record(key, line)
