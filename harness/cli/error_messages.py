"""Errors as the one line that a user sees."""

from __future__ import annotations

import sys

INTERRUPTED = 130  # 128 + SIGINT, as in shells
USAGE = 2
"""Exit code of a mistake of the user, or of something that cannot be read."""


def message_of(error: Exception) -> str:
    """The error's message in one line; of an error of the system its paths and its reason."""
    if not isinstance(error, OSError):
        return " ".join(str(error).split())
    paths = [str(path) for path in (error.filename, error.filename2) if path is not None]
    return ": ".join([" -> ".join(paths), error.strerror or "failed"]) if paths else str(error)


def print_error(message: str) -> int:
    """Print an error on standard error; returns the exit code for it."""
    sys.stderr.write(f"error: {' '.join(message.split())}\n")
    return USAGE
