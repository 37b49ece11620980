"""Caches the frames of a sweep as Parquet until a file that they were read from changes."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

import pandas as pd

LAYOUT_VERSION = 6
"""Raise this when a column of a cached frame changes, so that old caches are discarded."""

STAMP_LENGTH = 16

Frames = dict[str, pd.DataFrame]


def cached(sweep_path: Path, read: Callable[[Path], Frames]) -> Frames:
    """The frames that `read` returns for a sweep, from `derived/<sweep>/` if they are up to date."""
    folder = derived_folder(sweep_path)
    stamp = fingerprint(sweep_path)
    stored = folder / stamp
    if stored.is_dir():
        return {path.stem: pd.read_parquet(path) for path in stored.glob("*.parquet")}
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
    for pattern in ("*/cell.json", "*/attempt-*/*.json", "*/attempt-*/rank-*.jsonl"):
        for path in sorted(sweep_path.glob(pattern)):
            status = path.stat()
            digest.update(f"{path.relative_to(sweep_path)} {status.st_size} {status.st_mtime_ns}\n".encode())
    for path in sorted(sweep_path.glob("*/attempt-*")):  # an attempt without files counts too
        digest.update(f"{path.relative_to(sweep_path)}\n".encode())
    return digest.hexdigest()[:STAMP_LENGTH]


def _store(frames: Frames, folder: Path) -> None:
    for old in folder.parent.glob("[0-9a-f]" * STAMP_LENGTH):
        shutil.rmtree(old, ignore_errors=True)
    temporary = folder.with_name(f".{folder.name}")
    temporary.mkdir(parents=True, exist_ok=True)
    for name, frame in frames.items():
        frame.to_parquet(temporary / f"{name}.parquet", index=False)
    temporary.rename(folder)
