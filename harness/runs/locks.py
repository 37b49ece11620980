"""Files as locks: the kernel frees them when their holder ends, however it ends."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


def take(path: Path, *, wait: bool = False) -> IO[bytes] | None:
    """Lock a file, making it if needed; closing what is returned frees the lock.

    Args:
        path: the lock file; its folder must be there.
        wait: whether to queue up behind the present holder; waiters are served in order of arrival.

    Returns:
        The open file, or None if another process holds the lock and `wait` is false.
    """
    while True:
        file = path.open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            file.close()
            return None
        except BaseException:  # a signal handler raised while this waited
            file.close()
            raise
        if _lies_at(file, path):
            return file
        file.close()  # a cleaner removed the file meanwhile: a lock on a nameless file keeps nobody out


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold the lock for the length of a `with` block, after waiting for it."""
    file = take(path, wait=True)
    try:
        yield
    finally:
        if file is not None:
            file.close()


def _lies_at(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
