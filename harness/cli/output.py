"""Terminal output: plain text in a pipe, colours in a terminal."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from rich.box import HEAVY_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from harness.doctor.findings import Finding

T = TypeVar("T")

_STATE_STYLES = {
    "COMPLETED": "green", "done": "green", "RUNNING": "cyan", "PENDING": "yellow", "pending": "yellow",
    "STAGED": "dim", "new": "dim",
}  # fmt: skip
_ENDED_OTHERWISE = "red"

_PLAN_STATE_WIDTH = 8
_PIPE_COLUMNS = 120  # a pipe has no width; logs and pagers show at least this much


def print_left_out(errors: Sequence[str]) -> None:
    """Print on standard error how many stored cells this version cannot read, and why the first."""
    if errors:
        cells = "cell" if len(errors) == 1 else "cells"
        sys.stderr.write(f"left out: {len(errors)} stored {cells}; {errors[0]}\n")


def print_note(note: str) -> None:
    """Print a note on standard error, unless it is empty."""
    if note:
        sys.stderr.write(f"{note}\n")


def console() -> Console:
    """The console that commands print to; obeys NO_COLOR, COLUMNS and the terminal's width."""
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else _PIPE_COLUMNS
    return Console(width=width, highlight=False, soft_wrap=False)


def state_text(state: str) -> Text:
    """A state of a cell, of `status` or of `plan`; coloured where the console has colours."""
    return Text(state, style=_STATE_STYLES.get(state, _ENDED_OTHERWISE))


def print_line(screen: Console, *parts: str | Text) -> None:
    """Print literal text and leave its wrapping to the terminal, so that what it names can be copied."""
    if screen.color_system is None:  # many times faster: a sweep may have 100,000 cells
        screen.file.write("".join(map(str, parts)) + "\n")
    else:
        screen.print(Text.assemble(*parts), soft_wrap=True)


def print_by_state(screen: Console, rows: Sequence[tuple[str, str]]) -> None:
    """Print a state and a text on each line; plain text is not made of `Text`, which takes much longer."""
    if screen.color_system is None:
        print_line(screen, "\n".join(f"{state:<{_PLAN_STATE_WIDTH}}{text}" for state, text in rows))
        return
    for state, text in rows:
        print_line(screen, state_text(state), " " * (_PLAN_STATE_WIDTH - len(state)), text)


def print_lines(screen: Console, headings: Sequence[str], rows: Sequence[Sequence[str | Text]]) -> None:
    """Print aligned columns, one line a row however long: an id or a hint is never broken or cut."""
    texts = [[part if isinstance(part, Text) else Text(part) for part in row] for row in (headings, *rows)]
    widths = [max(text.cell_len for text in column) for column in zip(*texts, strict=True)]
    lines = []
    for row in texts:
        line = Text("  ").join(_padded(text, width) for text, width in zip(row, widths, strict=True))
        line.rstrip()
        lines.append(line)
    print_line(screen, Text("\n").join(lines))


def with_progress(items: Sequence[T], what: str, screen: Console) -> Iterator[T]:
    """The items, with a bar and the time left while they are worked on; nothing is shown in a pipe."""
    return iter(track(items, what, console=screen, transient=True, disable=not screen.is_terminal))


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


def print_findings(findings: Sequence[Finding]) -> None:
    """Print a table of findings, and how many there are of each state."""
    table = Table(box=None, pad_edge=False)
    for heading, ratio in (("check", None), ("state", None), ("found", 1), ("what to do", 1)):
        table.add_column(heading, overflow="fold", ratio=ratio, no_wrap=ratio is None)
    for one in findings:
        row = (one.check, one.state, one.found, one.advice)
        table.add_row(*map(Text, row))  # brackets are not markup
    console().print(table)
    counts: Counter[str] = Counter(one.state for one in findings)
    named = (("fault", "faults"), ("warning", "warnings"), ("ok", "ok"), ("skipped", "skipped"))
    parts = [f"{counts[one]} {one if counts[one] == 1 else several}" for one, several in named if counts[one]]
    sys.stdout.write(f"{', '.join(parts)}\n")


def _padded(text: Text, width: int) -> Text:
    padded = text.copy()
    padded.pad_right(width - text.cell_len)
    return padded
