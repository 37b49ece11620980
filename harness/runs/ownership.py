"""Whose files decide what is executed: only those that nobody but this user and root can have written.

`launch.json` and a submission manifest contain a command. In a folder that others may write they can be
somebody else's, so they are read and shown, but not executed, unless the site profile has `shared_runs`.

A file counts as own if it and every folder from its sweep's down to it belongs to this user or root, may be
written by no group and by no other users, and is no symbolic link. Access control lists count too: their
widest right shows as the group's. The folder of all sweeps may be shared, with the sticky bit where all users
may write it: whoever renames sweeps there cannot change their owner.
"""

from __future__ import annotations

import os
import pwd
import stat
from contextlib import ExitStack
from pathlib import Path

from harness.errors import ForeignError

_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_FOLDER = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe does not block


def foreign(path: Path, sweep: Path, seen: dict[str, str | None] | None = None) -> str | None:
    """Why a file or folder may be someone else's, one sentence; None if it is this user's own.

    Args:
        path: inside of `sweep`, or `sweep` itself; what does not exist is nobody's.
        sweep: folder of the sweep.
        seen: what was found of folders before, for many paths at once; is added to.
    """
    seen = {} if seen is None else seen
    above = f"{sweep}/.."
    if above not in seen:
        seen[above] = _foreign_parent(sweep)
    reason = seen[above]
    for part in _parts(path, sweep) if reason is None else ():
        if part not in seen:
            try:
                seen[part] = _foreign(part, os.lstat(part))
            except FileNotFoundError:
                return None
        if (reason := seen[part]) is not None:
            break
    return reason


def refuse_foreign(path: Path, sweep: Path) -> None:
    """Raise a ForeignError if the file or folder may be someone else's."""
    reason = foreign(path, sweep)
    if reason is not None:
        raise ForeignError(f"{reason}; {_REMEDY}")


def read_own(path: Path, sweep: Path) -> bytes:
    """Content of a file of this user's own.

    What is checked is what is read: every folder is opened from the one above it, and the file from the last,
    so that nobody can exchange one of them in between.

    Raises:
        ForeignError: the file, or a folder from `sweep` down to it, may be someone else's.
        FileNotFoundError: there is none.
    """
    if (reason := _foreign_parent(sweep)) is not None:
        raise ForeignError(f"{reason}; {_REMEDY}")
    with ExitStack() as opened:
        above: int | None = None
        for part in _parts(path, sweep):
            name = part if above is None else part.rpartition("/")[2]
            try:
                above = os.open(name, _FILE if part == str(path) else _FOLDER, dir_fd=above)
            except OSError as error:
                if not isinstance(error, FileNotFoundError):
                    refuse_foreign(Path(part), sweep)  # a symbolic link
                raise OSError(error.errno, error.strerror, part) from None
            opened.callback(os.close, above)
            reason = _foreign(part, os.fstat(above))
            if reason is not None:
                raise ForeignError(f"{reason}; {_REMEDY}")
        assert above is not None  # noqa: S101  # `path` is one of the parts
        with open(above, "rb", closefd=False) as file:
            return file.read()


def user_name(uid: int | None = None) -> str:
    """Name of a user, by default of this process's; without an entry, as in some containers, the number.

    Environment variables are not used, because they can be wrong and Slurm's jobs are looked up by this name.
    """
    number = os.getuid() if uid is None else uid
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


_REMEDY = (
    "what others may have written is shown, but not executed: look through it, then chmod -R go-w and remove "
    "what is not yours, or set shared_runs: true in the site profile"
)


def _parts(path: Path, sweep: Path) -> list[str]:
    """The sweep's folder, and everything from there down to `path`; as text, which is fast for many."""
    parts, inside = [str(sweep)], str(path)[len(str(sweep)) + 1 :]
    for name in inside.split("/") if inside else ():
        parts.append(f"{parts[-1]}/{name}")
    return parts


def _foreign_parent(sweep: Path) -> str | None:
    try:
        mode = sweep.parent.stat().st_mode
    except FileNotFoundError:
        return None
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        return f"{sweep.parent} may be written by all users (mode {stat.S_IMODE(mode):04o}) and is not sticky"
    return None


def _foreign(path: str, found: os.stat_result) -> str | None:
    if stat.S_ISLNK(found.st_mode):
        return f"{path} is a symbolic link"
    if found.st_uid not in (os.geteuid(), 0):
        return f"{path} belongs to user {user_name(found.st_uid)}, not to {user_name(os.geteuid())}"
    if found.st_mode & _WRITABLE_BY_OTHERS:
        return f"{path} may be written by other users (mode {stat.S_IMODE(found.st_mode):04o})"
    if not (stat.S_ISDIR(found.st_mode) or stat.S_ISREG(found.st_mode)):
        return f"{path} is neither a file nor a folder"
    return None
