"""One question to the broker and its answer."""

from __future__ import annotations

from typing import Any

from treadle._stream import Change, Stream, nothing_to_tell
from treadle_shared.errors import TreadleError


class Call:
    """One question to the broker, settled by one ``reply`` or one ``error``.

    A submission's ``streams`` are its sessions to be. ``abandoned``: the caller has left, so sessions that
    are accepted all the same are cancelled at once. ``resumes``: it offers a lost session; nobody waits for it.
    """

    def __init__(self, rid: int, streams: tuple[Stream, ...] = (), *, resumes: bool = False) -> None:
        self.rid = rid
        self.streams = streams
        self.resumes = resumes
        self.reply: Any = None
        self.error: TreadleError | None = None
        self.abandoned = False
        self.on_change: Change = nothing_to_tell

    @property
    def settled(self) -> bool:
        """Whether the answer is there."""
        return self.reply is not None or self.error is not None

    def settle(self, reply: Any = None, error: TreadleError | None = None) -> None:
        """The answer."""
        self.reply, self.error = reply, error
        self.on_change()
