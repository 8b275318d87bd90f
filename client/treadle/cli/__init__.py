"""The ``treadle`` command."""

import signal

__all__ = ["main"]


def main() -> int:
    """Run the command line of this process; the exit code.

    Until the command itself runs, Ctrl-C ends the process without a word: importing takes a moment, and a traceback
    out of an import helps nobody.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from treadle.cli.entry import main as run_command

    return run_command()
