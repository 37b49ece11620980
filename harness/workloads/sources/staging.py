"""Copies of data sets on a local disk of the node, made once for all its ranks (no torch)."""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
from collections.abc import Iterable
from pathlib import Path

from harness.workloads.sources.publish import publish_folder, unpack

STAGING_VARIABLE = "KRONSCALE_STAGING"


def staged(source: Path, parts: Iterable[str]) -> Path:
    """Where to read the folders `parts` of `source`: a local copy if KRONSCALE_STAGING is set.

    A site profile's `environment` sets the variable; `$TMPDIR` and the like in it are expanded on the node.
    If there is a `train.tar` beside or instead of a folder `train`, it is unpacked instead, which spares the
    file system a million small reads. Later runs on the node read the same copy.

    Raises:
        DataError: the copy cannot be made.
    """
    named = os.environ.get(STAGING_VARIABLE)
    if not named:
        return source
    resolved = source.resolve()
    key = hashlib.sha256(str(resolved).encode()).hexdigest()[:8]

    def copy(target: Path) -> None:
        for part in parts:
            archive = source / f"{part}.tar"
            if archive.is_file():
                with tarfile.open(archive) as packed:
                    unpack(packed, target / part)
            elif (source / part).is_dir():
                shutil.copytree(source / part, target / part)

    root = Path(os.path.expandvars(named)).expanduser()
    return publish_folder(
        root / f"kronscale-{resolved.name}-{key}",
        copy,
        what=f"a local copy of {source}",
        advice=f"name a larger disk of the node in {STAGING_VARIABLE}, or unset it to read {source} directly",
    )
