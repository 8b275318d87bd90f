"""Which process a connection belongs to: a fork copies the object, not its sockets and threads."""

from __future__ import annotations

import os

from treadle.errors import ForkedClient

_forks = 0  # how many forks lie between the first process and this one


def _forked() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_forked)


class Birthplace:
    """The process that made it. Asking costs no system call: every token of every session is waited for behind it."""

    __slots__ = ("_forks",)

    def __init__(self) -> None:
        self._forks = _forks

    @property
    def here(self) -> bool:
        """Whether this is still that process."""
        return self._forks == _forks

    def guard(self) -> None:
        """Raise ForkedClient in another process."""
        if self._forks != _forks:
            raise ForkedClient("this client was made before a fork; make a new one in the child process")
