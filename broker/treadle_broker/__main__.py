"""``python -m treadle_broker``."""

import sys

from treadle_broker.start import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
