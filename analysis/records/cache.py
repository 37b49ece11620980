"""Caches the frames of a sweep as Parquet until a file that they were read from changes."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import pandas as pd

from analysis.records.study import FRAMES
from harness.runs.store import SweepFolder

LAYOUT_VERSION = 13
"""Raise this when a column of a cached frame changes, so that old caches are discarded."""

STAMP_LENGTH = 16
_RECORDS = re.compile(r"rank-.*\.jsonl")

NAMES = ("cells", *FRAMES)
Frames = dict[str, pd.DataFrame]


def cached(sweep_path: Path, read: Callable[[Path], Frames]) -> Frames:
    """The frames that `read` returns for a sweep, from `derived/<sweep>/` if they are up to date.

    Nothing is cached where that would make `derived/` in the current directory.
    """
    folder = derived_folder(sweep_path)
    if folder.parent.parent == Path.cwd() and not folder.parent.is_dir():
        return read(sweep_path)
    stamp = fingerprint(sweep_path)
    stored = folder / stamp
    if stored.is_dir() and (found := _stored(stored)) is not None:
        return found
    frames = read(sweep_path)
    with contextlib.suppress(OSError):  # the frames are valid without a cache
        _store(frames, stored)
    return frames


def derived_folder(sweep_path: Path) -> Path:
    """The cache folder of a sweep: `results/derived/demo` for `results/runs/demo`."""
    resolved = sweep_path.resolve()
    return resolved.parent.parent / "derived" / resolved.name


def fingerprint(sweep_path: Path) -> str:
    """Hash of path, size and modification time of every file that the frames are read from."""
    digest = hashlib.sha256(f"{LAYOUT_VERSION}\n{sweep_path.resolve()}\n".encode())
    for folder in SweepFolder(sweep_path).stored():
        _add(digest, folder.id, (folder.path / "cell.json").stat())
        for attempt in folder.attempts():
            name = f"{folder.id}/{attempt.path.name}"
            digest.update(f"{name}\n".encode())  # an attempt without files counts too
            with os.scandir(attempt.path) as entries:
                for entry in sorted(entries, key=lambda one: one.name):
                    if entry.name.endswith(".json") or _RECORDS.fullmatch(entry.name):
                        _add(digest, f"{name}/{entry.name}", entry.stat())
    return digest.hexdigest()[:STAMP_LENGTH]


def _add(digest: hashlib._Hash, name: str, status: os.stat_result) -> None:
    digest.update(f"{name} {status.st_size} {status.st_mtime_ns}\n".encode())


def _stored(folder: Path) -> Frames | None:
    """The frames of a cache; None if a file is missing or damaged, which the checksum in its name shows."""
    frames = {}
    for name in NAMES:
        for path in folder.glob(f"{name}-*.parquet"):
            with contextlib.suppress(OSError):
                content = path.read_bytes()
                if path.name == _file_name(name, content):
                    frames[name] = pd.read_parquet(io.BytesIO(content))
    return frames if len(frames) == len(NAMES) else None


def _file_name(name: str, content: bytes) -> str:
    return f"{name}-{zlib.crc32(content):08x}.parquet"


def _store(frames: Frames, folder: Path) -> None:
    for old in folder.parent.glob("[0-9a-f]" * STAMP_LENGTH):
        shutil.rmtree(old, ignore_errors=True)
    temporary = folder.with_name(f".{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True, exist_ok=True)
    for name, frame in frames.items():
        content = frame.to_parquet(index=False)
        (temporary / _file_name(name, content)).write_bytes(content)
    temporary.rename(folder)
