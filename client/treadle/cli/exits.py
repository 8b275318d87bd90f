"""Exit codes: those of sysexits.h where one fits, so that a script can tell whose fault it was.

64 usage; 65 the request cannot be served as it is; 69 no node answers, or it drains; 70 the node failed the
session; 73 the session id is taken; 75 try again later; 76 the node speaks another protocol; 77 not allowed;
78 configuration. 130 after Ctrl-C and 141 where the reader of the output has left, as shells have them.
"""

from __future__ import annotations

from typing import Final

from treadle import errors
from treadle_shared.errors import EXIT_CONFIG, ConfigError, EngineError, RuntimeDirError, TreadleError

OK: Final = 0
FAILED: Final = 1
USAGE: Final = 64
DATA: Final = 65
UNAVAILABLE: Final = 69
SOFTWARE: Final = 70
CANNOT_CREATE: Final = 73
TRY_AGAIN: Final = 75
PROTOCOL: Final = 76
NO_PERMISSION: Final = 77
CONFIG: Final = EXIT_CONFIG
INTERRUPTED: Final = 130
PIPE: Final = 141

_CODES: Final[tuple[tuple[type[TreadleError], int], ...]] = (  # the first that fits counts
    (errors.InvalidRequest, DATA),
    (errors.ContextTooLong, DATA),
    (errors.BudgetExceeded, DATA),
    (errors.DuplicateSession, CANNOT_CREATE),
    (errors.Draining, UNAVAILABLE),
    (errors.Unavailable, UNAVAILABLE),
    (errors.Refused, TRY_AGAIN),
    (errors.DeadlineExceeded, TRY_AGAIN),
    (errors.CacheMiss, TRY_AGAIN),
    (errors.Cancelled, TRY_AGAIN),
    (errors.CallTimeout, TRY_AGAIN),
    (errors.SessionEnded, SOFTWARE),
    (errors.Forbidden, NO_PERMISSION),
    (errors.ProtocolError, PROTOCOL),
    (ConfigError, CONFIG),
    (RuntimeDirError, CONFIG),
    (EngineError, CONFIG),
)


def exit_code(error: TreadleError) -> int:
    """The exit code of an error."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), SOFTWARE)
