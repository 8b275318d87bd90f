"""``python -m treadle_worker --runtime-dir DIR [--config FILE]``."""

from __future__ import annotations

import sys

from treadle_worker.process import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
