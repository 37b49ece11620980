"""Reads the end of a file without the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_CHUNK_BYTES = 256 * 1024  # enough for a long traceback or some hundred phase records


def last_lines(path: Path) -> list[str]:
    """Whole lines at the end of a file, oldest first; empty if the file does not exist."""
    try:
        with path.open("rb") as file:
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
                record: dict[str, Any] = json.loads(line)
            except json.JSONDecodeError:  # truncated: its writer was killed or is still writing
                continue
            return record
    return None
