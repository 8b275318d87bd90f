"""``python -m treadle.cli``."""

import sys

from treadle.cli.entry import main

sys.exit(main())
