"""``python -m treadle_worker.verify --model FILE [--json] [--threads N] [--quick]``."""

from __future__ import annotations

import sys

from treadle_worker.verify.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
