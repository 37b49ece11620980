"""What is made of data once and kept on this machine for every later run (no torch)."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from harness.errors import DataError
from harness.runs.locks import exclusive

CACHE_VARIABLE = "KRONSCALE_CACHE"


def cached(name: str, prepare: Callable[[Path], None], what: str) -> Path:
    """The cache's folder `name`, made by `prepare` if it is not there; it appears whole, by rename.

    `what` it holds, in the plural, is named where it cannot be kept.

    Raises:
        DataError: it cannot be kept there.
    """
    root = _folder()
    target = root / name
    if target.is_dir():
        return target
    try:
        root.mkdir(parents=True, exist_ok=True)
        with exclusive(root / f".{name}.lock"):
            if not target.is_dir():  # else another rank was faster
                scratch = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=root))
                try:
                    prepare(scratch)
                    scratch.rename(target)
                finally:
                    shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise DataError(
            f"{root.absolute()}: {what} cannot be kept there: {error.strerror or error}; name a folder "
            f"with space in {CACHE_VARIABLE}"
        ) from None
    return target


def file_stamp(path: Path) -> str:
    """Filter, how long, when last written: reading all of a large text at each start takes minutes."""
    state = path.stat()
    return f"{path.resolve()} {state.st_size} {state.st_mtime_ns}"


def _folder() -> Path:
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kronscale"
