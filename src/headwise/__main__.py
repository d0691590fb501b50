"""`python -m headwise`: the same as the command `headwise`."""

import sys

from .cli import main

sys.exit(main())
