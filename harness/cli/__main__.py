"""`python -m harness.cli`, for hosts without the installed command on the path."""

import sys

from harness.cli import main

sys.exit(main())
