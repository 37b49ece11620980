"""Room for the last words: space on the disk that the outcome may use when ranks have filled it."""

from __future__ import annotations

import shutil

from harness.runs.store import Attempt

_LEAST_BYTES = 64 * 1024
_BYTES_A_RANK = 256  # an outcome takes some 130 for each rank's exit, and more where it has an error
_FULL_BYTES = 1024 * 1024


def reserve_disk(attempt: Attempt, world_size: int) -> None:
    """Take up the space that the outcome of so many ranks may need."""
    (attempt.path / ".ballast").write_bytes(bytes(max(_LEAST_BYTES, _BYTES_A_RANK * world_size)))


def release_reserve(attempt: Attempt) -> None:
    """Free it; does nothing where there is none."""
    (attempt.path / ".ballast").unlink(missing_ok=True)


def disk_is_full(attempt: Attempt) -> bool:
    """Whether the attempt's file system has no room for records."""
    return shutil.disk_usage(attempt.path).free < _FULL_BYTES
