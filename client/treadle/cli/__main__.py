"""``python -m treadle.cli``."""

import sys

from treadle.cli.main import main

sys.exit(main())
