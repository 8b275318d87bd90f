"""Run as ``python _tether.py PARENT SIGNAL PROGRAM ARGUMENT…``: become PROGRAM, but hear of PARENT's death.

The kernel is asked for SIGNAL at the parent's death (prctl(2), PR_SET_PDEATHSIG, kept across execve), so no child
outlives a supervisor that was killed for long. It comes once for every thread of the parent that the child is handed
to on the way, so it is no signal whose repetition means more. A parent that died before that is noticed by its
process id.
"""

import ctypes
import os
import sys

_PR_SET_PDEATHSIG = 1


def main(parent: int, number: int, command: list[str]) -> None:
    """Does not return."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() == parent:
        os.execv(command[0], command)  # noqa: S606  (the supervisor's own command, no shell)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
