"""Terminal output: plain text in a pipe, colours in a terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.box import HEAVY_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

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


def text_table(columns: Iterable[str], rows: Iterable[Iterable[object]]) -> Table:
    """A table of literal text, where brackets are not markup."""
    table = Table(box=None)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(value)) for value in row))
    return table


def figure_table(title: str, columns: Iterable[str], *left: str, lined: bool = False) -> Table:
    """An empty table of figures, right-aligned except in the columns `left`."""
    table = Table(box=HEAVY_HEAD if lined else None, title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right")
    return table
