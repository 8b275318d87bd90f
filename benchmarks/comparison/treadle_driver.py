"""Sends requests to a node through Treadle's own client."""

from __future__ import annotations

from comparison.job import Job
from comparison.trace import Outcome, Trace
from treadle import AsyncClient, TreadleError
from treadle.errors import Refused
from treadle.events import Done, TextDelta

_AS_ASKED = frozenset({"length", "stop"})


class TreadleDriver:
    """Asks one node, all requests through one client."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def ask(self, job: Job, trace: Trace) -> None:
        """One request to its end."""
        try:
            session = await self._client.generate(job.prompt, max_tokens=job.new_tokens, ignore_eos=True)
        except Refused as refusal:
            trace.end(Outcome.REFUSED, refusal.reason.value)
            return
        except TreadleError as error:
            trace.end(Outcome.FAILED, str(error))
            return
        async with session:
            async for event in session.events():
                if isinstance(event, TextDelta):
                    trace.came(list(event.tokens))
                elif isinstance(event, Done):
                    good = event.finish_reason in _AS_ASKED
                    trace.end(Outcome.DONE if good else Outcome.FAILED, event.finish_reason)
