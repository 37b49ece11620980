"""The end of a file, without reading the rest of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_CHUNK_BYTES = 256 * 1024  # holds a long traceback or some hundred phase records


def last_lines(path: Path, chunk_bytes: int = _CHUNK_BYTES) -> list[str]:
    """Whole lines at the end of a file, oldest first; empty if there is no such file."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            start = max(0, size - chunk_bytes)
            file.seek(start)
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    lines = text.splitlines()
    return lines[1:] if start else lines


def last_record(path: Path, kind: str) -> dict[str, Any] | None:
    """The newest record of `kind` near the end of a record file, or None."""
    return next(newest_records(path, kind), None)


def newest_records(path: Path, kind: str, chunk_bytes: int = _CHUNK_BYTES) -> Iterator[dict[str, Any]]:
    """The records of `kind` within the last `chunk_bytes` of a record file, newest first."""
    marker = f'"kind": "{kind}"'
    for line in reversed(last_lines(path, chunk_bytes)):
        if marker in line:
            try:
                record: dict[str, Any] = json.loads(line)
            except json.JSONDecodeError:  # half a line: its writer was killed, or is still writing
                continue
            yield record
