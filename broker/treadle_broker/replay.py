"""``python -m treadle_broker.replay FILE``: make every decision of a tick log again, by the scheduler alone.

Exit code 0 where each comes out as it was recorded, 1 where some do not (or part of the file is damaged), 78 where
the file is no tick log.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from treadle_broker.retrace import Retrace
from treadle_broker.tick_file import NotATickLog, TickReader
from treadle_broker.tick_records import FORMAT, Call, Cut, Opened, Record
from treadle_shared.errors import EXIT_CONFIG

_SHOWN: Final = 20  # differences that are told in full: those after the first few follow from them


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """Record number ``record`` (the opening is 0), a ``call`` at ``now``, would decide otherwise: by field, what was
    recorded and what it would be.
    """

    record: int
    call: str
    now: float | None
    decided: dict[str, Any]
    would_decide: dict[str, Any]


class Report(msgspec.Struct, kw_only=True):
    """What became of one file. ``cut``: it ends where it was full, and not at rest."""

    file: str
    number: int
    records: int = 0
    differences: int = 0
    shown: list[Difference] = []
    cut: bool = False
    torn_bytes: int = 0
    damaged: bool = False
    broken: str = ""

    @property
    def clean(self) -> bool:
        """Whether every record could be read and decided as it was."""
        return not (self.differences or self.damaged or self.broken)

    def lines(self) -> Iterable[str]:
        """The report for people."""
        for one in self.shown:
            at = "" if one.now is None else f" at {one.now:.6f}"
            yield f"record {one.record}: {one.call}{at}"
            for name, value in one.decided.items():
                yield f"  {name}: decided {_compact(value)}, would now decide {_compact(one.would_decide[name])}"
        if self.differences > len(self.shown):
            yield f"and {self.differences - len(self.shown)} more"
        if self.broken:
            yield f"the replay broke off: {self.broken}"
        if self.damaged:
            yield f"record {self.records + 1} is damaged; what follows cannot be read"
        if self.torn_bytes:
            yield f"the last record was not written whole ({self.torn_bytes} bytes)"
        if self.cut:
            yield "the file was full before the node was at rest: what followed was not recorded"
        yield f"{self.file}: {self.records} calls, {self.differences} differences"


def replay(path: Path) -> Report:
    """Raises NotATickLog where the file cannot be read as one."""
    try:
        with path.open("rb") as stream:
            reader = TickReader(stream)
            opened = reader.opened()
            if opened.format != FORMAT:
                raise NotATickLog(f"has format {opened.format}; this program reads {FORMAT}")
            report = Report(file=str(path), number=opened.number)
            _retrace(opened, reader.records(), report)
            report.damaged, report.torn_bytes = reader.damaged, reader.torn_bytes
            return report
    except OSError as error:
        raise NotATickLog(error.strerror or str(error)) from None


def main(arguments: Sequence[str]) -> int:
    """Run the command; the exit code."""
    options = _parser().parse_args(arguments)
    try:
        report = replay(options.file)
    except NotATickLog as error:
        print(f"{options.file}: {error}", file=sys.stderr)
        return EXIT_CONFIG
    if options.json:
        print(msgspec.json.encode(report).decode())
    else:
        print(*report.lines(), sep="\n")
    return 0 if report.clean else 1


def _retrace(opened: Opened, records: Iterable[Record], report: Report) -> None:
    retrace = Retrace(opened)
    for record in records:
        if isinstance(record, Cut):
            report.cut = True
            return
        if isinstance(record, Opened):
            report.broken = f"record {report.records + 1} opens a second log"
            return
        report.records += 1
        try:
            now = retrace.again(record)
        except Exception as error:  # a scheduler that took another path may not stand a record of this one
            report.broken = f"record {report.records} ({_name(record)}) raised {type(error).__name__}: {error}"
            return
        if now != record:
            _differs(record, now, report)


def _differs(record: Call, now: Call, report: Report) -> None:
    report.differences += 1
    if len(report.shown) == _SHOWN:
        return
    names = [name for name in record.__struct_fields__ if getattr(record, name) != getattr(now, name)]
    difference = Difference(
        record=report.records,
        call=_name(record),
        now=getattr(record, "now", None),
        decided={name: getattr(record, name) for name in names},
        would_decide={name: getattr(now, name) for name in names},
    )
    report.shown.append(difference)


def _name(record: Call) -> str:
    return str(record.__struct_config__.tag)


def _compact(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m treadle_broker.replay", description="Replay a tick log.")
    parser.add_argument("file", type=Path, metavar="FILE", help="a tick log, or its predecessor FILE.1")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
