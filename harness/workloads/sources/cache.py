"""Prepared data that is kept on this machine for later runs (no torch)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from harness.workloads.sources.publish import publish_folder

CACHE_VARIABLE = "KRONSCALE_CACHE"


def cached(name: str, prepare: Callable[[Path], None], what: str) -> Path:
    """The cache's folder `name`, written by `prepare` if it does not exist.

    Raises:
        DataError: the cache cannot be written; names `what` should have been written.
    """
    return publish_folder(
        _folder() / name, prepare, what=what, advice=f"name a folder with space in {CACHE_VARIABLE}"
    )


def file_stamp(path: Path) -> str:
    """Path, size and modification time: hashing all of a large text at each start takes minutes."""
    state = path.stat()
    return f"{path.resolve()} {state.st_size} {state.st_mtime_ns}"


def _folder() -> Path:
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kronscale"
