"""Shards: folders of images as a tar each, staged instead of a million small files (no torch)."""

from __future__ import annotations

import hashlib
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

from harness.errors import DataError

_CHUNK_BYTES = 1 << 20


def build_shard(folder: Path) -> Path | None:
    """Write `<folder>.tar` beside the folder, and its SHA-256 in `<folder>.tar.sha256`.

    The same files give the same bytes. A shard that has a checksum is complete and is kept.

    Returns:
        The shard; None if there was one.

    Raises:
        DataError: the folder is missing or empty, or the shard cannot be written.
    """
    shard = folder.with_name(f"{folder.name}.tar")
    if shard.is_file() and checksum_file(shard).is_file():
        return None
    files = sorted(_files(folder)) if folder.is_dir() else []
    if not files:
        raise DataError(f"{folder} has no file, so there is nothing to pack")
    temporary = shard.with_name(f".{shard.name}.part")
    try:
        with tarfile.open(temporary, "w", format=tarfile.PAX_FORMAT) as archive:
            for name in files:
                member = tarfile.TarInfo(name)
                member.size, member.mode = (folder / name).stat().st_size, 0o644
                with (folder / name).open("rb") as file:
                    archive.addfile(member, file)
        temporary.replace(shard)
        checksum_file(shard).write_text(f"{_sha256(shard)}  {shard.name}\n")
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise DataError(f"{shard} cannot be written: {error.strerror or error}; free some space") from None
    return shard


def check_shard(shard: Path) -> str | None:
    """Why a shard is not what was written; None if it is, or has no checksum."""
    written = checksum_file(shard)
    if not written.is_file():
        return None
    expected, got = written.read_text().split(maxsplit=1)[0], _sha256(shard)
    return None if expected == got else f"{shard} has the SHA-256 {got}, {written.name} says {expected}"


def checksum_file(shard: Path) -> Path:
    """Where a shard's checksum is, as `sha256sum --check` reads it."""
    return shard.with_name(f"{shard.name}.sha256")


def _files(folder: Path) -> Iterator[str]:
    for parent, _, names in os.walk(folder, followlinks=True):
        for name in names:
            if not name.startswith("."):
                yield Path(parent, name).relative_to(folder).as_posix()


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while part := file.read(_CHUNK_BYTES):
            digest.update(part)
    return digest.hexdigest()
