"""Tables for people: plain text in a pipe, colours in a terminal that wants them."""

from __future__ import annotations

import os
import sys

from rich.console import Console

_PIPE_COLUMNS = 120  # a pipe has no width; logs and pagers show at least this


def console() -> Console:
    """Where verbs print; obeys NO_COLOR, COLUMNS and the terminal's width."""
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else _PIPE_COLUMNS
    return Console(width=width, highlight=False, soft_wrap=False)
