"""Writes files of the run folder whole or not at all, also on a disk that is full.

A folder may have a reserve: a file of zeros that occupies what its last file needs. Where the disk is full,
that file is written into the reserve's blocks, which are then renamed. So cells can be cancelled, and
outcomes be written, whatever filled the disk in the meantime.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from harness.errors import StoreError

RESERVE = ".reserve"

_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)


def write_atomically(path: Path, text: str, *, use_reserve: bool = False, private: bool = False) -> None:
    """Write a file so that readers see the old or the new content, even after a crash.

    Args:
        path: of the file.
        text: its content.
        use_reserve: whether it is the file for which its folder has a reserve.
        private: whether only its owner may read it, even where the group may read the folder.

    Raises:
        OSError: the disk is full, for example; with the path, and the old content is unchanged.
    """
    temporary = _write_beside(path, text, use_reserve=use_reserve, private=private)
    temporary.replace(path)


def write_once(path: Path, text: str, *, use_reserve: bool = False) -> bool:
    """Write a file unless it exists; returns whether this call wrote it.

    Arguments as those of `write_atomically`.

    Raises:
        OSError: the disk is full, for example; with the path, which does not exist then.
        StoreError: the file system has no hard links.
    """
    if path.exists():
        return False
    temporary = _write_beside(path, text, use_reserve=use_reserve)
    try:
        os.link(temporary, path)  # unlike a rename, a link fails if the file exists
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        raise StoreError(
            f"{path}: its file system refuses hard links ({error.strerror}), by which the first of two "
            f"writers wins; keep runs on another file system (--runs; kronscale doctor --runs checks one)"
        ) from None
    finally:
        temporary.unlink()
    return True


def make_inside(folder: Path) -> None:
    """Make a folder with the permissions of its parent, whatever the umask."""
    folder.mkdir(mode=0o700)
    folder.chmod(folder.parent.stat().st_mode & 0o2750)


def make_reserve(folder: Path, size: int) -> None:
    """Occupy `size` bytes for files that are written into `folder` when the disk is full.

    Raises:
        OSError: there is no space; with the path.
    """
    reserve = folder / RESERVE
    if not reserve.exists() or reserve.stat().st_size < size:
        write_atomically(reserve, "\0" * size)


def release_reserve(folder: Path) -> None:
    """Free the folder's reserve; does nothing if there is none."""
    (folder / RESERVE).unlink(missing_ok=True)


def is_full(error: OSError) -> bool:
    """Whether the error says that there is no space on the disk, or none in the user's quota."""
    return error.errno in _FULL


def _write_beside(path: Path, text: str, *, use_reserve: bool, private: bool = False) -> Path:
    """A new file of that content beside `path`, on the disk."""
    content, mode = text.encode(), stat.S_IRUSR | stat.S_IWUSR
    if not private:
        mode |= path.parent.stat().st_mode & stat.S_IRGRP  # readable by the group if the folder is
    try:
        return _write_new(path, content, mode)
    except OSError as error:
        in_reserve = _write_into_reserve(path, content, mode) if use_reserve and is_full(error) else None
        if in_reserve is not None:
            return in_reserve
        raise OSError(error.errno, error.strerror, str(path)) from None


def _write_new(path: Path, content: bytes, mode: int) -> Path:
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            _fill(file.fileno(), content, mode)
    except BaseException:
        Path(name).unlink()
        raise
    return Path(name)


def _write_into_reserve(path: Path, content: bytes, mode: int) -> Path | None:
    """The reserve, renamed, with that content; None if there is none that is large enough."""
    reserve = path.with_name(RESERVE)
    taken = path.with_name(f".{path.name}.reserve-{os.getpid()}")
    try:
        if reserve.stat().st_size < len(content):
            return None
        reserve.rename(taken)  # of two writers one gets it
        descriptor = os.open(taken, os.O_WRONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        _fill(descriptor, content, mode)
        os.truncate(descriptor, len(content))
        os.fsync(descriptor)
    except OSError:  # a file system that writes to new blocks, as some do
        with suppress(OSError):
            taken.rename(reserve)
        return None
    finally:
        os.close(descriptor)
    return taken


def _fill(descriptor: int, content: bytes, mode: int) -> None:
    os.fchmod(descriptor, mode)
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
    os.fsync(descriptor)
