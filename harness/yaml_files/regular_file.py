"""Reads a file that a user names: a regular one, of bounded size, as text."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from harness.errors import UserError


def read_text(path: Path, most_bytes: int, error_class: type[UserError]) -> str:
    """The text of a file in UTF-8.

    Raises:
        UserError: of the class `error_class`; the file is missing, unreadable, too large, no UTF-8, or a
            folder, pipe or device, which could block or never end.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # opening a pipe would block
        with os.fdopen(descriptor, "rb") as file:
            mode = os.fstat(descriptor).st_mode
            if not stat.S_ISREG(mode):
                raise error_class(f"{path}: must be a regular file, got {_kind(mode)}")
            content = file.read(most_bytes + 1)
    except FileNotFoundError:
        raise error_class(f"{path}: no such file") from None
    except (OSError, ValueError) as error:  # ValueError: NUL in the path, and the errors above
        if isinstance(error, UserError):
            raise
        raise error_class(f"{path}: cannot be read: {error}") from None
    if len(content) > most_bytes:
        raise error_class(f"{path}: has more than {most_bytes >> 10} KiB, the most that is allowed")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise error_class(f"{path}: cannot be read as text: {error}") from None


def _kind(mode: int) -> str:
    kinds = {stat.S_ISDIR: "a folder", stat.S_ISFIFO: "a pipe", stat.S_ISSOCK: "a socket"}
    return next((name for is_kind, name in kinds.items() if is_kind(mode)), "a device")
