"""`python -m harness.cli`, where the installed command is not on the path."""

import sys

from harness.cli import main

sys.exit(main())
