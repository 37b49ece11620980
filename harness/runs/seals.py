"""Seals: checksums by which a reader notices that a file of a run was changed after the run had ended.

Each rank's records end with a `SealRecord`. The outcome holds checksums of the small files that tables are
made from, and of itself. They find accidents (a cut copy, a full disk, an edited number), not forgery.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from harness.errors import StoredFileError
from harness.runs.records import SealRecord
from harness.runs.stored_files import read_object

SEALED_FILES = ("cell.json", "launch.json", "environment.json", "layers.json", "result.json")
"""`cell.json` is in the folder above; all are complete before the outcome is written."""

_WRITTEN_LATER = {"launch.json": ("job_id",)}  # a queue adds it after it has submitted the attempt
_SEAL_HEAD = re.compile(rb'\{"schema": [0-9]+, "kind": "%s"' % SealRecord.KIND.encode())


def small_file(attempt: Path, name: str) -> Path:
    """Path of one of `SEALED_FILES`."""
    return attempt.parent / name if name == "cell.json" else attempt / name


def seals_of(attempt: Path) -> dict[str, int]:
    """Checksums of the small files that an attempt has."""
    found = {}
    for name in SEALED_FILES:
        with suppress(OSError, StoredFileError):
            found[name] = checksum(name, read_object(small_file(attempt, name)))
    return found


def checksum(name: str, content: Mapping[str, Any]) -> int:
    """Checksum of a small file's content, whatever its layout and the order of its keys."""
    kept = {key: value for key, value in content.items() if key not in _WRITTEN_LATER.get(name, ())}
    return zlib.crc32(json.dumps(kept, sort_keys=True).encode())


def check_small_file(
    attempt: Path, name: str, content: Mapping[str, Any] | None, seals: Mapping[str, int]
) -> None:
    """Refuse a small file that differs from its seal in the outcome; `content` is None if it is missing.

    Raises:
        StoredFileError: it was changed, removed or added after the attempt had ended.
    """
    path = small_file(attempt, name)
    if content is None:
        if name in seals:
            raise StoredFileError(path, "is missing; the attempt had it when it ended")
    elif seals and name not in seals:
        raise StoredFileError(path, "was added after the attempt had ended")
    elif seals and checksum(name, content) != seals[name]:
        raise StoredFileError(path, f"was changed after the attempt had ended (crc32 is not {seals[name]})")


def split_seal(content: bytes) -> tuple[bytes, bytes | None]:
    """The records of a rank's file, and its seal if its last line is one."""
    start = content.rfind(b"\n", 0, len(content) - 1) + 1
    if _SEAL_HEAD.match(content, start):
        return content[:start], content[start:]
    return content, None
