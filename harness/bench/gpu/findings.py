"""What a part of an acceptance run found, on disk after every addition: tables, checks, notes (no torch)."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PASSED, FAILED = "passed", "failed"
RUNNING = "running"
BROKEN = "broke off"
TIMED_OUT = "out of time"
NOT_RUN = "not run"
"""Outcomes of a part."""

Row = dict[str, Any]


class Findings:
    """The findings of one part, in one JSON file.

    Args:
        path: the file; written whole after every addition, so that a part that is stopped leaves what it had.
        about: facts that identify the part and the machine.

    Attributes:
        content: `outcome`, `tables` (rows by name), `checks` (`name`, `passed`, `found`), `notes`, and
            `about`.
    """

    def __init__(self, path: Path, about: Row) -> None:
        self._path = path
        self.content: Row = {**about, "outcome": RUNNING, "checks": [], "notes": [], "tables": {}}
        self.save()

    def row(self, table: str, **values: Any) -> None:
        """Add a row to a table."""
        self.content["tables"].setdefault(table, []).append(values)
        self.save()

    def check(self, name: str, found: str, *, passed: bool) -> None:
        """Add something that must hold, with what was found."""
        self.content["checks"].append({"name": name, "passed": bool(passed), "found": found})
        self.save()

    def note(self, text: str) -> None:
        """Add a sentence for the report."""
        self.content["notes"].append(text)
        self.save()

    def finish(self, *, complete: bool) -> None:
        """The part has ended by itself; `complete` unless it left out work for lack of time."""
        held = all(check["passed"] for check in self.content["checks"])
        self.content["outcome"] = FAILED if not held else PASSED if complete else TIMED_OUT
        self.save()

    def save(self) -> None:
        """Write the file."""
        write_json(self._path, self.content)


def write_json(path: Path, content: Row) -> None:
    """Replace a file in one step, so that a reader never finds half of it."""
    half = path.with_name(f".{path.name}.{os.getpid()}")
    half.write_text(json.dumps(content, indent=1) + "\n")
    half.replace(path)


def read_json(path: Path) -> Row | None:
    """What a part wrote; None if there is no file, or none that can be read."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def write_tables(folder: Path, part: str, tables: dict[str, list[Row]]) -> None:
    """Each table as `<part>-<table>.csv`."""
    for name, rows in tables.items():
        columns = list(dict.fromkeys(column for row in rows for column in row))
        with (folder / f"{part}-{name}.csv").open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(columns)
            writer.writerows([_plain(row.get(column)) for column in columns] for row in rows)


def _plain(value: Any) -> Any:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else value


def failed_checks(parts: Iterable[Row]) -> list[str]:
    """`part: name: found` of every check that does not hold."""
    return [
        f"{part['part']}: {check['name']}: {check['found']}"
        for part in parts
        for check in part.get("checks", [])
        if not check["passed"]
    ]
