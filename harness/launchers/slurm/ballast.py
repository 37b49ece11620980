"""Room for the last words: space on the disk that the outcome may use when ranks have filled it."""

from __future__ import annotations

import shutil

from harness.store import Attempt

_BYTES = 64 * 1024  # an outcome of 1,000 ranks takes about this much
_FULL_BYTES = 1024 * 1024


def lay_ballast(attempt: Attempt) -> None:
    """Take up the space."""
    (attempt.path / ".ballast").write_bytes(bytes(_BYTES))


def drop_ballast(attempt: Attempt) -> None:
    """Free it; does nothing where there is none."""
    (attempt.path / ".ballast").unlink(missing_ok=True)


def disk_is_full(attempt: Attempt) -> bool:
    """Whether the attempt's file system has no room for records."""
    return shutil.disk_usage(attempt.path).free < _FULL_BYTES
