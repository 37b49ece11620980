"""Terminal output: plain text in a pipe, colours in a terminal."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from harness.runs.store import SweepFolder

_PIPE_COLUMNS = 120  # a pipe has no width; logs and pagers show at least this much


def print_left_out(folder: SweepFolder) -> None:
    """Print on standard error how many stored cells this version cannot read, and why the first."""
    if errors := folder.version_errors():
        cells = "cell" if len(errors) == 1 else "cells"
        sys.stderr.write(f"left out: {len(errors)} stored {cells}; {errors[0]}\n")


def console() -> Console:
    """The console that commands print to; obeys NO_COLOR, COLUMNS and the terminal's width."""
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else _PIPE_COLUMNS
    return Console(width=width, highlight=False, soft_wrap=False)
