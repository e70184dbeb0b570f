"""`python -m refluent` is the command `refluent`."""

import sys

from refluent.cli import main

sys.exit(main())
