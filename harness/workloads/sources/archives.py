"""Extraction of tar archives that cannot write outside its folder, with or without tarfile's filters."""

from __future__ import annotations

import tarfile
from pathlib import Path


def unpack(archive: tarfile.TarFile, folder: Path) -> None:
    """Extract all members into `folder`.

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
