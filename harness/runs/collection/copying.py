"""Copies the files of an attempt, so that it appears whole and an interrupted copy is continued."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from harness.errors import StoreError
from harness.runs.atomic_files import make_inside
from harness.runs.collected import NAME as MARK
from harness.runs.collected import Collected, CopiedFile
from harness.runs.collection.attempts import LOGS, Stamp, StoredAttempt
from harness.runs.store import Attempt

_UNFINISHED = ".collecting-"
_CHUNK_BYTES = 1 << 20
_MAPPED = ".pulse"  # a memory map is written without a new time


@dataclass(frozen=True)
class Copying:
    """How files are copied.

    Attributes:
        source: where they come from, for `collected.json`.
        logs: whether the ranks' standard output is kept.
        link: whether files may share their blocks with the source, which replaces and never changes them.
        checksum: whether what was copied is read back and compared.
    """

    source: str
    logs: bool = True
    link: bool = False
    checksum: bool = False

    def unfinished(self, target: Attempt) -> Attempt:
        """The folder in which a new attempt is put together; readers do not see it."""
        return Attempt(target.path.with_name(f"{_UNFINISHED}{target.path.name}"))

    def copy_new(self, one: StoredAttempt, target: Attempt) -> Attempt:
        """Copy an attempt beside `target`, for `publish`; what an interrupted copy has is kept."""
        folder = self.unfinished(target)
        if not folder.path.is_dir():
            make_inside(folder.path)
        self._copy(one, folder)
        kept = {*one.stamps(logs=self.logs), MARK}
        for path in folder.path.rglob("*"):  # of an interrupted copy of something else
            if path.is_file() and path.relative_to(folder.path).as_posix() not in kept:
                path.unlink()
        return folder

    def publish(self, folder: Attempt, target: Attempt) -> None:
        """Make what `copy_new` copied visible."""
        folder.path.rename(target.path)

    def discard(self, folder: Attempt) -> None:
        """Remove what `copy_new` copied."""
        shutil.rmtree(folder.path, ignore_errors=True)

    def refresh(self, one: StoredAttempt, target: Attempt) -> None:
        """Copy the attempt over its older, unfinished copy; the outcome, if there is one now, last."""
        self._copy(one, target)

    def _copy(self, one: StoredAttempt, folder: Attempt) -> None:
        stamps = one.stamps(logs=self.logs)
        if any(name.startswith(f"{LOGS}/") for name in stamps):
            folder.make_logs()
        outcome = {name: stamps.pop(name) for name in ("outcome.json",) if name in stamps}
        files = {name: self._copy_file(one, name, folder, stamp) for name, stamp in stamps.items()}
        # Marked before the outcome: what was copied so far is a copy, and nobody's to decide about.
        self._mark(one, folder, files, ended=False)
        if outcome:
            files |= {name: self._copy_file(one, name, folder, stamp) for name, stamp in outcome.items()}
            self._mark(one, folder, files, ended=True)

    def _mark(
        self, one: StoredAttempt, folder: Attempt, files: Mapping[str, CopiedFile], *, ended: bool
    ) -> None:
        mark = Collected(self.source, time.time(), one.identity, ended, files)
        write_whole(folder.path / MARK, mark.to_json().encode())

    def _copy_file(self, one: StoredAttempt, name: str, folder: Attempt, stamp: Stamp) -> CopiedFile:
        source, target = one.attempt.path / name, folder.path / name
        if _stamp(target) == stamp and not name.endswith(_MAPPED):  # copied before; times are set last
            return CopiedFile(*stamp, sha256_of(target, stamp.bytes))
        digest = self._linked(source, target) or _copied(source, target, stamp)
        if self.checksum and sha256_of(target) != digest:
            raise StoreError(f"{target} does not read as it was written; the disk may be damaged")
        return CopiedFile(*stamp, digest)

    def _linked(self, source: Path, target: Path) -> str | None:
        if not self.link:
            return None
        temporary = target.with_name(f".{target.name}.part")
        try:
            temporary.unlink(missing_ok=True)
            os.link(source, temporary)
        except OSError:  # across file systems, or where there are no links
            return None
        temporary.chmod(_mode(target.parent))
        temporary.replace(target)
        return sha256_of(target)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file by rename; `merge` syncs all at its end, because syncing each of 10,000 takes minutes."""
    temporary = path.with_name(f".{path.name}.part")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    with open(os.open(temporary, flags, _mode(path.parent)), "wb") as file:  # noqa: PTH123  a descriptor
        file.write(content)
    temporary.replace(path)


def sha256_of(path: Path, most: int | None = None) -> str:
    """SHA-256 of a file's content, or of its first `most` bytes."""
    digest, left = hashlib.sha256(), most
    with path.open("rb", buffering=0) as file:
        while part := file.read(_CHUNK_BYTES if left is None else min(_CHUNK_BYTES, left)):
            digest.update(part)
            left = None if left is None else left - len(part)
    return digest.hexdigest()


def _copied(source: Path, target: Path, stamp: Stamp) -> str:
    """Copy the first `stamp.bytes` of a file, which may grow meanwhile; returns their checksum.

    Raises:
        StoreError: the file became shorter.
    """
    digest, left = hashlib.sha256(), stamp.bytes
    temporary = target.with_name(f".{target.name}.part")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    with source.open("rb", buffering=0) as read:
        descriptor = os.open(temporary, flags, _mode(target.parent))
        with open(descriptor, "wb", buffering=0) as written:  # noqa: PTH123  a descriptor, not a path
            while left and (part := read.read(min(_CHUNK_BYTES, left))):
                digest.update(part)
                written.write(part)
                left -= len(part)
    if left:
        raise StoreError(f"{source} became shorter while it was read; collect again")
    os.utime(temporary, ns=(stamp.mtime_ns, stamp.mtime_ns))
    temporary.replace(target)
    return digest.hexdigest()


def _mode(folder: Path) -> int:
    """Readable by the group if the folder is, as all files of runs."""
    return stat.S_IRUSR | stat.S_IWUSR | folder.stat().st_mode & stat.S_IRGRP


def _stamp(path: Path) -> Stamp | None:
    try:
        state = path.stat()
    except FileNotFoundError:
        return None
    return Stamp(state.st_size, state.st_mtime_ns)
