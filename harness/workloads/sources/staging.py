"""Data brought to a disk of the node before it is read many times, once for all ranks there (no torch)."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import tarfile
from collections.abc import Iterable
from pathlib import Path

from harness.errors import DataError
from harness.runs.locks import exclusive
from harness.workloads.sources.archives import unpack

STAGING_VARIABLE = "KRONSCALE_STAGING"


def staged(source: Path, parts: Iterable[str]) -> Path:
    """Filter to read the folders `parts` of `source`: in a local copy if KRONSCALE_STAGING names its place.

    A site profile's `environment` sets the variable; `$TMPDIR` and its like in it mean the node's. Beside a
    folder `train` a `train.tar` of what is in it is unpacked instead, which spares the file system a million
    small reads. The copy appears whole, by rename, and serves later runs on the node too.

    Raises:
        DataError: there is no space, or the copy cannot be made.
    """
    named = os.environ.get(STAGING_VARIABLE)
    if not named:
        return source
    root = Path(os.path.expandvars(named)).expanduser()
    key = hashlib.sha256(str(source.resolve()).encode()).hexdigest()[:8]
    target = root / f"kronscale-{source.resolve().name}-{key}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        with exclusive(root / f"{target.name}.lock"):
            if not target.is_dir():
                _copy(source, target, parts)
    except (OSError, shutil.Error, tarfile.TarError) as error:
        raise DataError(_refusal(source, root, error)) from None
    return target


def _copy(source: Path, target: Path, parts: Iterable[str]) -> None:
    unfinished = target.with_name(f"{target.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)  # of a rank that was killed
    unfinished.mkdir()
    try:
        for part in parts:
            packed = source / f"{part}.tar"
            if packed.is_file():
                with tarfile.open(packed) as archive:
                    unpack(archive, unfinished / part)
            elif (source / part).is_dir():
                shutil.copytree(source / part, unfinished / part)
        unfinished.rename(target)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _refusal(source: Path, root: Path, error: Exception) -> str:
    said = " ".join(str(error).split())[:300]
    if (isinstance(error, OSError) and error.errno == errno.ENOSPC) or "No space left" in said:
        free = shutil.disk_usage(root).free / 2**30
        said = f"no space left, {free:.3g} GiB are free after giving back the part that was copied"
    return (
        f"{source} could not be staged in {root}: {said}; name a larger disk of the node in "
        f"{STAGING_VARIABLE}, or unset it to read where the data lies"
    )
