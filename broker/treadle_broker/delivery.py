"""What the scheduler's events mean for clients: streams grow, start, recover and end."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from treadle_broker.connections import Connection, Connections
from treadle_broker.library import StreamLibrary
from treadle_broker.plan import Emitted, Event, Finished, Promoted, Rebuilding
from treadle_broker.publisher import Publisher
from treadle_broker.scheduler import Scheduler
from treadle_broker.stream import Stream
from treadle_shared.calls import Position, Recovering, Started
from treadle_shared.log import get_logger
from treadle_shared.outcome import DoneReason

_log = get_logger("session")


class Delivery:
    """Takes events in order. ``exact`` says whether finished answers may be called exact."""

    def __init__(
        self,
        scheduler: Scheduler,
        library: StreamLibrary,
        connections: Connections,
        publisher: Publisher,
        exact: Callable[[], bool],
    ) -> None:
        self._scheduler = scheduler
        self._library = library
        self._connections = connections
        self._publisher = publisher
        self._exact = exact

    def take(self, events: Iterable[Event], now: float) -> None:
        """Apply events; a stop string ends its session here."""
        for event in events:
            stream = self._library.get(event.key)
            if isinstance(event, Emitted):
                self._emitted(stream, event, now)
            elif isinstance(event, Finished):
                self._finished(stream, event, now)
            elif isinstance(event, Promoted):
                self._promoted(stream, event)
            else:
                self._rebuilding(stream, event)

    def tell_positions(self) -> None:
        """Tell every waiting client that reads how many are ahead of it. Costs the queue's length."""
        behind = {connection for connection in self._connections.all() if connection.outbox}
        for key, ahead in self._scheduler.positions():
            stream = self._library.get(key)
            if self._reader(stream) not in behind:
                self._say(stream, Position(session_id=key.session_id, epoch=key.epoch, ahead=ahead))

    def _emitted(self, stream: Stream, event: Emitted, now: float) -> None:
        if stream.done is not None:  # the stop string was completed by an earlier token of this very result
            return
        if event.index == 0:
            stream.recipe = self._scheduler.facts.recipe_fingerprint
        stopped = stream.append(event, now)
        self._connections.notice(stream)
        digests = stream.new_digests()
        if digests:
            self._scheduler.extend(event.key, digests)
        if stopped:
            ended = self._scheduler.stop(event.key, stream.emitted, DoneReason.STOP, now, "stop string")
            self.take(ended, now)

    def _promoted(self, stream: Stream, event: Promoted) -> None:
        stream.start(event.queued_s)
        key = event.key
        self._say(stream, Started(session_id=key.session_id, epoch=key.epoch, queued_s=event.queued_s))
        self._publisher.publish("session", {"event": "started", **_name(stream), "queued_s": event.queued_s})

    def _rebuilding(self, stream: Stream, event: Rebuilding) -> None:
        key = event.key
        self._say(stream, Recovering(session_id=key.session_id, epoch=key.epoch, why=event.why[:512]))
        self._publisher.publish("session", {"event": "recovering", **_name(stream), "why": event.why})

    def _finished(self, stream: Stream, event: Finished, now: float) -> None:
        if stream.done is not None:
            return
        done = stream.finish(event, self._exact(), now)
        self._library.finish(stream)
        self._connections.notice(stream)
        line = {
            **_name(stream),
            "reason": done.reason.value,
            "detail": done.detail,
            "prompt_tokens": done.usage.prompt_tokens,
            "completion_tokens": done.usage.completion_tokens,
            "cached_tokens": done.usage.cached_tokens,
            "queued_s": round(done.timings.queued_s, 6),
            "ttft_s": None if done.timings.ttft_s is None else round(done.timings.ttft_s, 6),
            "total_s": round(done.timings.total_s, 6),
        }
        self._publisher.publish("session", {"event": "done", **line})
        _log.info("session", **line)

    def _reader(self, stream: Stream) -> Connection | None:
        return self._connections.reader(stream)

    def _say(self, stream: Stream, message: Position | Started | Recovering) -> None:
        reader = self._reader(stream)
        if reader is not None:
            reader.say(message)
            self._connections.touch(reader)


def _name(stream: Stream) -> dict[str, object]:
    return {"client": stream.key.client, "session_id": stream.key.session_id, "epoch": stream.key.epoch}
