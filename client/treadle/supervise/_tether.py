"""Run as ``python _tether.py PARENT PROGRAM ARGUMENT…``: become PROGRAM, but end when PARENT does.

The kernel is asked for SIGTERM at the parent's death (prctl(2), PR_SET_PDEATHSIG, kept across execve), so no
child outlives a supervisor that was killed. A parent that died before that is noticed by its process id.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(parent: int, command: list[str]) -> None:
    """Does not return."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() == parent:
        os.execv(command[0], command)  # noqa: S606  (the supervisor's own command, no shell)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
