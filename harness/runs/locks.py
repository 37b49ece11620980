"""File locks: the kernel releases them when their holder ends, even by SIGKILL."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from harness.errors import StoreError


def take(path: Path, *, wait: bool = False) -> IO[bytes] | None:
    """Lock a file, creating it if needed; closing the returned file releases the lock.

    Args:
        path: the lock file; its folder must exist.
        wait: whether to wait for the present holder; waiters get the lock in order of arrival.

    Raises:
        StoreError: the file system has no locks.

    Returns:
        The open file, or None if another process holds the lock and `wait` is false.
    """
    file = path.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        file.close()
        return None
    except OSError as error:  # as on some network file systems
        file.close()
        raise StoreError(
            f"{path}: its file system refuses locks ({error.strerror}); keep runs on another (--runs; "
            f"kronscale doctor --runs checks one)"
        ) from None
    except BaseException:  # a signal handler raised while this waited
        file.close()
        raise
    return file


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Wait for the lock and hold it during a `with` block."""
    file = take(path, wait=True)
    try:
        yield
    finally:
        if file is not None:
            file.close()
