"""The tick log: what is in it, what it survives, and what a replay finds."""

from __future__ import annotations

import inspect
import json
import struct
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hand_worker import answer, budget, facts, finish, job, key, planned
from structlog.testing import capture_logs

from treadle_broker.marks import Marks
from treadle_broker.pace import PaceMarks
from treadle_broker.prefix_hash import PrefixHasher
from treadle_broker.replay import main, replay
from treadle_broker.scheduler import Scheduler
from treadle_broker.session import Job
from treadle_broker.tick_file import MAGIC, NotATickLog, TickFile, TickReader, framed, predecessor
from treadle_broker.tick_log import RecordedScheduler, TickLog, open_tick_log
from treadle_broker.tick_records import Completed, Opened, Planned, Record, Submitted
from treadle_shared.admission import AdmissionDecision, AdmissionReason
from treadle_shared.config import make_config
from treadle_shared.errors import ConfigError
from treadle_shared.outcome import DoneReason
from treadle_shared.ticks import ResultRow, TickResult

TOKEN = 1_234_567_890
BIG = 1 << 20


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ticks.log"


def node(path: Path, limit: int = BIG, depth: int = 1, **changes: int) -> RecordedScheduler:
    """A recorded scheduler whose worker is there."""
    scheduler = RecordedScheduler(budget(**changes), facts(), TickLog(TickFile(path), limit), depth=depth)
    scheduler.worker_ready(facts(), 0.0)
    return scheduler


def read(path: Path) -> list[Record]:
    """Every record of a file."""
    with path.open("rb") as stream:
        reader = TickReader(stream)
        records: list[Record] = [reader.opened(), *reader.records()]
        assert not reader.damaged
        return records


def write(path: Path, records: list[Record]) -> None:
    """A file of these records, with right checksums."""
    path.write_bytes(MAGIC + b"".join(framed(record) for record in records))


def some_life(scheduler: Scheduler) -> None:
    """Everything that a scheduler can be told."""
    scheduler.submit([job("a", deadline=50.0), job("b", prompt=300)], 1.0)
    scheduler.take_promoted()
    scheduler.complete(answer(planned(scheduler, 1.1)), 1.2)
    scheduler.refuse(AdmissionDecision(reason=AdmissionReason.REJECTED_QUOTA, session_id="c"))
    scheduler.submit([job(f"q{number}", queue_deadline=2.0) for number in range(4)], 1.3)
    scheduler.cancel(key("b"), 1.4)
    scheduler.worker_lost(1.5)
    scheduler.worker_ready(facts(), 1.6, budget(max_active=1, queue_depth=1))
    assert scheduler.full_refusal("ann", "d", 1, 1.7) is not None
    scheduler.expire(2.5)
    scheduler.complete(answer(planned(scheduler, 3.0)), 3.1)
    scheduler.stop(key("a"), 1, DoneReason.STOP, 3.2)
    scheduler.drain()
    finish(scheduler, 4.0)


# ---- replay


@pytest.mark.parametrize("depth", [1, 2])
def test_a_log_of_every_kind_of_call_is_replayed_without_a_difference(path: Path, depth: int) -> None:
    some_life(node(path, depth=depth))
    kinds = {record.__struct_config__.tag for record in read(path)}
    assert kinds == {
        "opened", "submit", "full", "refuse", "drain", "cancel", "stop", "expire", "plan", "promoted", "complete",
        "worker_ready", "worker_lost",
    }  # fmt: skip
    report = replay(path)
    assert report.clean
    assert report.records == len(read(path)) - 1


def test_every_public_method_is_recorded_or_changes_nothing() -> None:
    looks = {
        "find", "next_deadline", "next_plan", "positions", "sessions", "telemetry", "check", "marks", "remember",
        "ready", "idle", "at_rest", "facts", "kv_drift_rows", "kv_rows_peak", "cache_misses", "stale_results",
        "overtaken", "awaits_answer",
    }  # fmt: skip
    public = {name for name, _ in inspect.getmembers(Scheduler) if not name.startswith("_")}
    assert public - looks == {name for name in vars(RecordedScheduler) if not name.startswith("_")}


def _moved(record: Planned) -> Planned:
    session, slot, gen, start, n, sample, n_emitted = record.prefill[0]
    return msgspec.structs.replace(record, prefill=[(session, slot, gen, start, n - 1, sample, n_emitted)])


def _refused(record: Submitted) -> Submitted:
    verdict = msgspec.structs.replace(record.verdicts[0], reason=AdmissionReason.REJECTED_QUEUE_FULL)
    return msgspec.structs.replace(record, verdicts=[verdict, *record.verdicts[1:]])


def _kept_kv(record: Completed) -> Completed:
    return msgspec.structs.replace(record, kv_tokens=record.kv_tokens + 1)


@pytest.mark.parametrize(
    ("kind", "change", "field"),
    [
        (Planned, _moved, "prefill"),
        (Submitted, _refused, "verdicts"),
        (Completed, _kept_kv, "kv_drift"),
        (Completed, lambda record: msgspec.structs.replace(record, events=record.events[1:]), "events"),
    ],
)
def test_a_changed_record_is_found_by_its_number(
    path: Path, kind: type, change: Callable[[Any], Record], field: str, capsys: pytest.CaptureFixture[str]
) -> None:
    some_life(node(path))
    records = read(path)
    number = next(number for number, record in enumerate(records) if _fits(record, kind))
    records[number] = change(records[number])
    write(path, records)

    assert main([str(path), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    first = report["shown"][0]
    assert (first["record"], list(first["decided"])) == (number, [field])
    assert first["decided"][field] != first["would_decide"][field]
    assert main([str(path)]) == 1
    assert capsys.readouterr().out.startswith(f"record {number}: ")


def _fits(record: Record, kind: type) -> bool:
    if isinstance(record, Planned):
        return kind is Planned and bool(record.prefill)
    if isinstance(record, Completed):
        return kind is Completed and bool(record.events)
    return isinstance(record, kind)


def test_a_replay_that_breaks_off_says_where(path: Path) -> None:
    some_life(node(path))
    records = read(path)
    lost = next(number for number, record in enumerate(records) if isinstance(record, Submitted))
    jobs = [{"client": "x"}]
    records[lost] = msgspec.structs.replace(records[lost], jobs=jobs)
    write(path, records)
    report = replay(path)
    assert not report.clean
    assert report.broken.startswith(f"record {lost} (submit) raised TypeError")


def test_many_differences_are_counted_and_some_are_shown(path: Path) -> None:
    scheduler = node(path, depth=1)
    scheduler.submit([job("a", new=60)], 0.0)
    finish(scheduler)
    records = read(path)
    opened = records[0]
    assert isinstance(opened, Opened)
    records[0] = msgspec.structs.replace(opened, marks=msgspec.structs.replace(opened.marks, next_tick=1000))
    write(path, records)
    report = replay(path)
    assert report.differences > 60
    assert len(report.shown) == 20
    assert any("more" in line for line in report.lines())


# ---- the file


def test_nothing_of_a_client_is_in_the_file(path: Path) -> None:
    scheduler = node(path)
    scheduler.submit([job("secret-session", client="secret-client", prompt=3)], 0.0)
    while (plan := scheduler.plan(0.0)) is not None:
        rows = [ResultRow(row.slot, row.gen, TOKEN if row.sample else -1) for row in (*plan.decode, *plan.prefill)]
        scheduler.complete(TickResult(broker_id="b", worker_id="w", tick_id=plan.tick_id, rows=rows), 0.0)
    scheduler.submit([job("x"), job("x")], 0.0)
    scheduler.submit([job("secret-cancel")], 0.0)
    scheduler.cancel(key("secret-cancel"), 0.0, detail="secret-detail")
    data = path.read_bytes()
    assert len(data) > 200
    for text in ("secret", "ann", *(f"{TOKEN}", f"{TOKEN:x}")):
        assert text.encode() not in data
    for order in "<>":
        assert struct.pack(f"{order}i", TOKEN) not in data


def test_ids_are_other_hashes_in_another_log(tmp_path: Path) -> None:
    jobs = []
    for name in ("one", "two"):
        path = tmp_path / name
        node(path).submit([job("a")], 0.0)
        jobs += [record.jobs for record in read(path) if isinstance(record, Submitted)]
    assert jobs[0][0]["client"] != jobs[1][0]["client"]
    assert jobs[0][0]["session_id"] != jobs[1][0]["session_id"]


def test_a_log_is_for_its_owner_alone(path: Path) -> None:
    node(path)
    assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("lost", [1, 7, 20])
def test_a_torn_tail_is_reported_and_no_difference(path: Path, lost: int) -> None:
    some_life(node(path))
    whole = replay(path)
    data = path.read_bytes()
    path.write_bytes(data[:-lost])
    report = replay(path)
    assert report.clean
    assert report.torn_bytes > 0
    assert whole.records - 3 < report.records < whole.records


def test_zeros_at_the_end_are_a_torn_tail_too(path: Path) -> None:
    some_life(node(path))
    with path.open("ab") as stream:
        stream.write(bytes(4096))
    report = replay(path)
    assert (report.clean, report.torn_bytes) == (True, 4096)


def test_damage_in_the_midst_is_no_torn_tail(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    some_life(node(path))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert main([str(path)]) == 1
    assert "damaged" in capsys.readouterr().out


@pytest.mark.parametrize("content", [None, b"", b"hello\n", MAGIC, MAGIC + bytes(50), MAGIC + framed(Planned(0.0))])
def test_what_is_no_tick_log_exits_with_78(
    path: Path, content: bytes | None, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        path.write_bytes(content)
    assert main([str(path)]) == 78
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert str(path) in shown.err


def test_another_format_is_refused(path: Path) -> None:
    node(path)
    opened = read(path)[0]
    assert isinstance(opened, Opened)
    write(path, [msgspec.structs.replace(opened, format=1)])
    with pytest.raises(NotATickLog, match="format 1"):
        replay(path)


# ---- calls that decide nothing


def test_an_idle_node_writes_nothing(path: Path) -> None:
    scheduler = node(path)
    before = path.stat().st_size
    for turn in range(1000):
        scheduler.expire(float(turn))
        assert scheduler.plan(float(turn)) is None
        scheduler.take_promoted()
        scheduler.cancel(key("nobody"), float(turn))
    assert path.stat().st_size == before
    scheduler.submit([job("a")], 1000.0)
    assert [record.now for record in read(path)[-3:]] == [999.0, 999.0, 1000.0]  # type: ignore[union-attr]


# ---- bounds


def test_file_and_predecessor_keep_within_the_bound_and_both_replay(path: Path) -> None:
    limit = 20_000
    scheduler = node(path, limit=limit)
    for number in range(300):
        scheduler.submit([job(f"s{number % 7}", prompt=2, new=3)], float(number))
        finish(scheduler, float(number))
        sizes = [file.stat().st_size for file in (path, predecessor(path)) if file.exists()]
        assert sum(sizes) <= limit
    assert {file.name for file in path.parent.iterdir()} == {"ticks.log", "ticks.log.1"}
    older, newer = replay(predecessor(path)), replay(path)
    assert older.clean
    assert newer.clean
    assert newer.number == older.number + 1 > 2
    opened = read(path)[0]
    assert isinstance(opened, Opened)
    assert opened.counts["submitted_total"] > 100
    assert max(epoch for _, _, epoch in opened.marks.epochs) > 10


def test_a_full_file_ends_while_sessions_run_and_a_new_one_begins_at_rest(path: Path) -> None:
    scheduler = node(path, limit=8000)
    scheduler.submit([job("long", new=400)], 0.0)
    with capture_logs() as lines:
        finish(scheduler)
    assert [line["event"] for line in lines] == ["tick_log_full"]
    assert path.stat().st_size < 4000
    cut = replay(predecessor(path))
    assert (cut.clean, cut.cut) == (True, True)
    scheduler.submit([job("next")], 9.0)
    finish(scheduler, 9.0)
    report = replay(path)
    assert (report.clean, report.cut, report.number) == (True, False, 1)
    assert report.records > 9


def test_what_an_earlier_process_left_becomes_the_predecessor(path: Path) -> None:
    some_life(node(path))
    first = path.read_bytes()
    some_life(node(path))
    assert predecessor(path).read_bytes() == first
    assert replay(path).clean


def test_a_fresh_scheduler_remembers_every_mark() -> None:
    marks = Marks(
        next_tick=5,
        next_gen=6,
        kv_drift=7,
        last_result_at=8.0,
        tick_s=0.9,
        pace=PaceMarks(0.1, 0.2),
        epoch_floor=12,
        epochs=[("ann", "a", 13), ("bob", "a", 14)],
        kept=[(2, 4, b"a" * 16), (3, 5, b"b" * 16)],
    )
    fresh = Scheduler(budget(cache_slots=2), facts(max_sequences=4, can_copy=True))
    assert all(getattr(marks, name) != getattr(fresh.marks(), name) for name in Marks.__struct_fields__)
    fresh.remember(marks)
    assert fresh.marks() == marks


# ---- a disk that fails


class FullDisk:
    """Takes so many frames, then none."""

    def __init__(self, frames: int) -> None:
        self.size = 0
        self.closed = False
        self._left = frames

    def append(self, data: bytes) -> None:
        if not self._left:
            raise OSError(28, "No space left on device")
        self._left -= 1
        self.size += len(data)

    def start_anew(self) -> None:
        raise OSError(28, "No space left on device")

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("frames", [0, 1, 5])
def test_a_full_disk_closes_the_log_with_one_warning_and_the_scheduler_goes_on(frames: int) -> None:
    disk = FullDisk(frames)
    with capture_logs() as lines:
        scheduler = RecordedScheduler(budget(), facts(), TickLog(disk, BIG), depth=1)
        scheduler.worker_ready(facts(), 0.0)
        some_life(scheduler)
    assert [(line["event"], line["log_level"]) for line in lines] == [("tick_log_closed", "warning")]
    assert lines[0]["error"] == "No space left on device"
    assert disk.closed
    plain = Scheduler(budget(), facts(), depth=1)
    plain.worker_ready(facts(), 0.0)
    some_life(plain)
    assert scheduler.telemetry(9.0) == plain.telemetry(9.0)


def test_a_disk_that_fails_between_two_files_closes_the_log() -> None:
    disk = FullDisk(1 << 20)
    scheduler = RecordedScheduler(budget(), facts(), TickLog(disk, 8000), depth=1)
    scheduler.worker_ready(facts(), 0.0)
    with capture_logs() as lines:
        for number in range(20):
            scheduler.submit([job(f"{number}")], 0.0)
            finish(scheduler)
    assert [line["event"] for line in lines] == ["tick_log_closed"]
    assert scheduler.telemetry(0.0).done_total == 20


# ---- configuration


def bad_paths(folder: Path) -> Iterator[Path]:
    yield folder
    yield folder / "missing" / "ticks.log"
    yield Path("/dev/null")


def test_a_path_that_cannot_be_written_is_refused_by_its_key(tmp_path: Path) -> None:
    for bad in bad_paths(tmp_path):
        with pytest.raises(ConfigError) as refused:
            open_tick_log(make_config({"tick_log": str(bad)}))
        assert refused.value.key == "tick_log"


def test_there_is_no_log_unless_it_is_asked_for() -> None:
    assert open_tick_log(make_config({})) is None


def test_a_new_file_finds_what_is_kept_in_the_order_in_which_it_was(tmp_path: Path) -> None:
    hasher = PrefixHasher("node", 4)

    def asking(name: str, own: int) -> Job:
        tokens = array("i", [*range(8), *range(own, own + 12)])
        return job(name, len(tokens), 2, prefix=hasher.chain("ann", "").grow(tokens))

    log = TickLog(TickFile(tmp_path / "ticks.log"), 8_000)
    engine = facts(can_copy=True, max_sequences=8)
    scheduler = RecordedScheduler(budget(cache_slots=2, prefix_block_tokens=4), engine, log, depth=1)
    scheduler.worker_ready(engine, 0.0)
    for name, own in (("x", 20), ("y", 40), ("x again", 20)):  # of two that begin alike, the older was used last
        scheduler.submit([asking(name, own)], 0.0)
        finish(scheduler)
    while log.files == 1:
        scheduler.submit([job("between", 3, 3)], 0.0)
        finish(scheduler)
    scheduler.submit([asking("z", 60)], 0.0)
    finish(scheduler)
    log.close()
    report = replay(tmp_path / "ticks.log")
    assert (report.number, list(report.lines())[:-1]) == (1, [])
