"""Telemetry during load: every signal moves, every snapshot balances, a late subscriber catches up."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import zmq
from real_node import RealNode, wait_for

from treadle import ContextTooLong
from treadle.tail import Gap, TelemetryEvent, TelemetryTail, fetch_replay
from treadle_shared import SchedulerTelemetry
from treadle_shared.rundir import RuntimeDir

MOVING = {
    "active_sessions",
    "queue_depth",
    "batch_occupancy_last",
    "batch_occupancy_avg",
    "batch_occupancy_max",
    "kv_bytes",
    "kv_pressure",
    "scratch_bytes",
    "scratch_pressure",
    "ticks_total",
    "prefill_tokens_total",
    "decode_tokens_total",
    "prefill_tokens_per_s",
    "decode_tokens_per_s",
    "submitted_total",
    "done_total",
    "cancelled_total",
    "rejected_total",
    "rejected_by_reason",
}


def _load(node: RealNode) -> None:
    with node.client() as client:
        sessions = [client.generate(f"{number} " * 9, max_tokens=200, ignore_eos=True) for number in range(24)]
        sessions[-1].cancel()
        with pytest.raises(ContextTooLong):
            client.generate("x" * 9999, max_tokens=1)
        for session in sessions:
            session.wait()


def _collect(node: RealNode, until: threading.Event) -> list[TelemetryEvent]:
    events: list[TelemetryEvent] = []
    with TelemetryTail(node.path) as tail:
        while not until.is_set():
            events += [event for event in tail.receive(0.2) if isinstance(event, TelemetryEvent)]
    return events


def test_every_signal_moves_and_every_snapshot_balances(make_node: Any) -> None:
    node = make_node(engine="reference", telemetry_interval_s=0.01).start().wait_ready()
    done, events = threading.Event(), []
    reader = threading.Thread(target=lambda: events.extend(_collect(node, done)))
    reader.start()
    wait_for(lambda: node.telemetry() is not None, "the node answers")
    _load(node)
    node.wait_idle()
    time.sleep(0.1)  # lets the last snapshots reach the reader; nothing is asserted of their timing
    done.set()
    reader.join()
    snapshots = [event.facts for event in events if event.topic == "snapshot"]
    keys = set(SchedulerTelemetry.__struct_fields__)
    for facts in snapshots:
        assert keys <= set(facts)
        settled = sum(facts[f"{name}_total"] for name in ("done", "failed", "cancelled", "rejected"))
        assert facts["submitted_total"] == facts["queue_depth"] + facts["active_sessions"] + settled
        assert facts["kv_drift_rows"] == 0
    still = {key for key in MOVING if len({json.dumps(facts[key]) for facts in snapshots}) < 2}
    assert not still
    assert {event.topic for event in events} >= {"snapshot", "tick", "session", "admission", "worker"}
    sent = [event.facts["tick_id"] for event in events if event.topic == "tick" and event.facts["event"] == "sent"]
    assert sent == sorted(set(sent))


def test_a_late_subscriber_gets_the_last_value_and_can_fetch_what_it_missed(reference_node: RealNode) -> None:
    with reference_node.client() as client:
        client.generate("x", max_tokens=5).wait()
    with TelemetryTail(reference_node.path, ("worker",)) as tail:
        (event,) = tail.receive(5.0)
        assert isinstance(event, TelemetryEvent)
        assert event.facts["ready"] is True
        missed = tail.replay(Gap("session", 0, 10))
        assert [item.sequence for item in missed] == list(range(len(missed)))
        assert len(missed) >= 2


def test_what_was_published_can_be_fetched_without_a_subscription(reference_node: RealNode) -> None:
    with reference_node.client() as client:
        client.generate("x", max_tokens=5, ignore_eos=True).wait()
    with zmq.Context() as context:
        events = fetch_replay(context, RuntimeDir(reference_node.path), Gap("tick", 0, 1000))
    assert [event.sequence for event in events] == list(range(len(events)))
    assert sum(event.facts["event"] == "ran" for event in events) >= 5


@pytest.mark.parametrize(
    ("settings", "options", "held"),
    [
        ({"coalesce_ms": 0}, {}, False),
        ({"coalesce_ms": 40}, {}, True),
        ({"coalesce_ms": 40}, {"stop": ["no such text"]}, False),
    ],
)
def test_answers_that_leave_together_bring_the_same_tokens(
    make_node: Any, settings: dict[str, int], options: dict[str, Any], held: bool
) -> None:
    node = make_node(engine="reference", **settings).start().wait_ready()
    asked = {"max_tokens": 200, "ignore_eos": True, **options}
    with node.client() as client:
        sessions = [client.generate(f"{number} things", **asked) for number in range(3)]
        together = [session.result() for session in sessions]
        alone = [client.generate(f"{number} things", **asked).result() for number in range(3)]
    assert together == alone
    with zmq.Context() as context:
        events = fetch_replay(context, RuntimeDir(node.path), Gap("tick", 0, 10_000))
    assert any(event.facts.get("hold") for event in events) is held


def test_the_command_line_tells_the_same_facts(reference_node: RealNode) -> None:
    command = [sys.executable, "-m", "treadle.cli", "status", "--json", "--runtime-dir", str(reference_node.path)]
    facts = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=30).stdout)
    assert {"ready", "reason", "exact", "recipe", "model", "pids", "telemetry"} <= set(facts)
    assert facts["pids"] == {name: process.pid for name, process in reference_node.processes.items()}
    assert set(SchedulerTelemetry.__struct_fields__) <= set(facts["telemetry"])
