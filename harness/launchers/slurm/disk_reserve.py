"""Reserves disk space for the outcome, in case the ranks fill the disk."""

from __future__ import annotations

import shutil

from harness.runs.store import Attempt

_LEAST_BYTES = 64 * 1024
_BYTES_PER_RANK = 256  # a rank's exit takes some 130 in the outcome, and more with an error
_FULL_BYTES = 1024 * 1024


def reserve_disk(attempt: Attempt, world_size: int) -> None:
    """Occupy the space that the outcome of `world_size` ranks may need."""
    (attempt.path / ".ballast").write_bytes(bytes(max(_LEAST_BYTES, _BYTES_PER_RANK * world_size)))


def release_reserve(attempt: Attempt) -> None:
    """Free the reserved space; does nothing if there is none."""
    (attempt.path / ".ballast").unlink(missing_ok=True)


def disk_is_full(attempt: Attempt) -> bool:
    """Whether the attempt's file system is full."""
    return shutil.disk_usage(attempt.path).free < _FULL_BYTES
