"""``python -m treadle.cli``."""

import sys

from treadle.cli import main

sys.exit(main())
