"""Follow a node's telemetry: what is published, what was missed, and what the replay still has of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

import msgpack
import zmq

from treadle.errors import Unavailable
from treadle_shared import codec
from treadle_shared.errors import MalformedMessage
from treadle_shared.rundir import RuntimeDir, find_runtime_dir

TOPICS: Final = ("snapshot", "tick", "session", "admission", "worker")
RECEIVE_HWM: Final = 10_000  # events that wait for a slow reader; beyond it there are gaps, which the replay fills
REPLAY_TIMEOUT_MS: Final = 2_000  # a broker answers between two ticks
REPLAY_CHUNK: Final = 512  # events asked for at once: an answer stays far below a frame's bound
MAX_REPLAY: Final = 100_000  # events fetched for one gap; a longer one is reported as lost


@dataclass(frozen=True, slots=True)
class TelemetryEvent:
    """One published map. ``sequence`` counts the events of its topic; ``replayed``: it was missed at first."""

    topic: str
    sequence: int
    facts: dict[str, Any]
    replayed: bool = False


@dataclass(frozen=True, slots=True)
class Gap:
    """Events ``first`` to ``last`` of a topic were missed; ``recovered`` of them came from the replay."""

    topic: str
    first: int
    last: int
    recovered: int = 0


class Sequences:
    """The last sequence number of every topic, for one boot of the broker."""

    def __init__(self) -> None:
        self._boot_id: object = None
        self._last: dict[str, int] = {}

    def take(self, event: TelemetryEvent) -> tuple[bool, Gap | None]:
        """Whether an event is new, and what was missed before it.

        The first event of a topic sets its place. One that was seen before is the last value sent again to
        a new subscriber.
        """
        boot_id = event.facts.get("boot_id")
        if boot_id != self._boot_id:
            self._boot_id = boot_id
            self._last.clear()
        last = self._last.get(event.topic)
        if last is not None and event.sequence <= last:
            return False, None
        self._last[event.topic] = event.sequence
        missed = last is not None and event.sequence > last + 1
        return True, Gap(event.topic, (last or 0) + 1, event.sequence - 1) if missed else None


class TelemetryTail:
    """A subscription to some topics of a node; all of them by default.

    Raises Unavailable where no broker lives in the runtime directory. It outlives the broker: when a new one
    starts there, its events follow.
    """

    def __init__(self, runtime_dir: str | os.PathLike[str] | None = None, topics: tuple[str, ...] = ()) -> None:
        self._directory = find_runtime_dir(runtime_dir)
        if not self._directory.is_live():
            raise Unavailable(f"{self._directory.path}: no broker lives there")
        self._sequences = Sequences()
        self._context = zmq.Context[zmq.Socket[bytes]]()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, RECEIVE_HWM)
        self._socket.setsockopt(zmq.LINGER, 0)
        for topic in topics or ("",):
            self._socket.setsockopt(zmq.SUBSCRIBE, topic.encode())
        self._socket.connect(self._directory.telemetry)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the subscription."""
        self._socket.close()
        self._context.term()

    def __iter__(self) -> Iterator[TelemetryEvent | Gap]:
        """Events as they come. What was missed comes first, as far as the replay has it, then the Gap."""
        while True:
            yield from self.receive()

    def receive(self, timeout_s: float | None = None) -> list[TelemetryEvent | Gap]:
        """What the next message comes to; empty after ``timeout_s`` seconds without one."""
        if not self._socket.poll(None if timeout_s is None else int(timeout_s * 1000)):
            return []
        event = parse(self._socket.recv_multipart())
        if event is None:
            return []
        new, gap = self._sequences.take(event)
        if gap is None:
            return [event] if new else []
        missed = self.replay(gap)
        return [*missed, Gap(gap.topic, gap.first, gap.last, len(missed)), event]

    def replay(self, gap: Gap) -> list[TelemetryEvent]:
        """What the broker still keeps of a gap."""
        return fetch_replay(self._context, self._directory, gap)


def fetch_replay(context: zmq.Context[zmq.Socket[bytes]], directory: RuntimeDir, gap: Gap) -> list[TelemetryEvent]:
    """What the broker of a runtime directory still keeps of a gap. Asking is no subscription: the node sends nothing
    for it before or after.
    """
    if gap.last - gap.first >= MAX_REPLAY:
        return []
    events: list[TelemetryEvent] = []
    with context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(directory.replay)
        for first in range(gap.first, gap.last + 1, REPLAY_CHUNK):
            last = min(first + REPLAY_CHUNK - 1, gap.last)
            socket.send(msgpack.packb([gap.topic, first, last]))
            if not socket.poll(REPLAY_TIMEOUT_MS):
                break
            events += parse_replay(socket.recv_multipart())
    return events


def parse(frames: list[bytes], replayed: bool = False) -> TelemetryEvent | None:
    """An event from ``[topic, u64 big-endian sequence, msgpack map]``; None where it is not one."""
    try:
        topic, sequence, body = frames
        facts = codec.unpack(body)
        name = topic.decode()
    except (ValueError, MalformedMessage):
        return None
    if len(sequence) != 8 or not isinstance(facts, dict):
        return None
    return TelemetryEvent(name, int.from_bytes(sequence, "big"), facts, replayed)


def parse_replay(frames: list[bytes]) -> list[TelemetryEvent]:
    """The events of one replay answer: ``b"replay"``, then three frames for each."""
    triples = [frames[place : place + 3] for place in range(1, len(frames), 3)]
    return [event for triple in triples if (event := parse(triple, replayed=True)) is not None]
