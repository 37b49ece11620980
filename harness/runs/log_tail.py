"""Reads the end of a file without the rest."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness.errors import StoredFileError
from harness.runs.record_lines import parse, read_head
from harness.runs.stored_files import open_regular

_CHUNK_BYTES = 256 * 1024  # enough for a long traceback or some hundred phase records


def last_lines(path: Path) -> list[str]:
    """Whole lines at the end of a file, oldest first; empty if the file does not exist."""
    try:
        with open_regular(path) as file:
            size = file.seek(0, 2)
            start = max(0, size - _CHUNK_BYTES)
            file.seek(start)
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    lines = text.splitlines()
    return lines[1:] if start else lines


def last_record(path: Path, kind: str) -> dict[str, Any] | None:
    """The newest record of `kind` near the end of a record file, or None."""
    marker = f'"kind": "{kind}"'
    for line in reversed(last_lines(path)):
        if marker in line:
            try:
                record = parse(read_head(line.encode(), path, 0), path)
            except StoredFileError:  # truncated: its writer was killed or is still writing
                continue
            if record is not None:
                return asdict(record)
    return None
