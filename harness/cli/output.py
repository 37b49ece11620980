"""Tables for people: plain text in a pipe, colours in a terminal that wants them."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from harness.runs.store import SweepFolder

_PIPE_COLUMNS = 120  # a pipe has no width; logs and pagers show at least this


def say_foreign(folder: SweepFolder) -> None:
    """One line on standard error where stored cells are left out, with the reason of the first."""
    if foreign := folder.foreign():
        sys.stderr.write(f"left out: {len(foreign)} stored cells; {foreign[0]}\n")


def console() -> Console:
    """Filter verbs print; obeys NO_COLOR, COLUMNS and the terminal's width."""
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else _PIPE_COLUMNS
    return Console(width=width, highlight=False, soft_wrap=False)
