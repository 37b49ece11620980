"""Folders that are written once and appear whole, and the unpacking of archives into them (no torch)."""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

from harness.errors import DataError
from harness.runs.locks import exclusive


def publish_folder(target: Path, fill: Callable[[Path], object], *, what: str, advice: str) -> Path:
    """Return `target`, after writing it if it does not exist.

    One process holds a lock, fills a folder beside `target` and renames it; the others wait for the lock.
    What a failed or killed process wrote is removed, so that `target` is always complete.

    Args:
        target: the folder; its parents are created.
        fill: writes the content into the folder that it is given.
        what: the content, for the error message.
        advice: end of the error message: what the user can do.

    Raises:
        DataError: the disk, the network or an archive failed.
    """
    try:
        if not target.is_dir():
            target.parent.mkdir(parents=True, exist_ok=True)
            with exclusive(target.with_name(f".{target.name}.lock")):
                if not target.is_dir():  # another process may have written it while this one waited
                    _write(target, fill)
    except (OSError, tarfile.TarError) as error:
        folder = target.parent.absolute()
        raise DataError(
            f"{what} could not be written to {folder}: {_reason(error, folder)}; {advice}"
        ) from None
    return target


def unpack(archive: tarfile.TarFile, folder: Path) -> None:
    """Extract all members into `folder`; nothing is written outside it.

    Filters came with Python 3.11.4, and Debian 12 has 3.11.2: there only regular files and folders are
    extracted.

    Raises:
        tarfile.TarError: a member would lie outside the folder, or is of another type.
    """
    if hasattr(tarfile, "data_filter"):
        archive.extractall(folder, filter="data")
        return
    root = folder.resolve()
    for member in archive:
        inside = (root / member.name).resolve().is_relative_to(root)
        if not (inside and (member.isreg() or member.isdir())):
            raise tarfile.ExtractError(f"{member.name!r} is not a regular file or folder inside {folder}")
        archive.extract(member, folder, set_attrs=False)


def _write(target: Path, fill: Callable[[Path], object]) -> None:
    unfinished = target.with_name(f"{target.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed
    try:
        unfinished.mkdir()
        fill(unfinished)
        unfinished.rename(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _reason(error: Exception, folder: Path) -> str:
    text = " ".join(str(error).split())
    if "No space left" in text:  # shutil.copytree collects the errors of many files as text
        return f"no space left, {shutil.disk_usage(folder).free / 2**20:.3g} MiB are free"
    return text[:300] or type(error).__name__
