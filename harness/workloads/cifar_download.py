"""CIFAR's published archive, brought into a folder once, whoever asks first (no torch)."""

from __future__ import annotations

import errno
import hashlib
import shutil
import tarfile
import tempfile
import urllib.error
import urllib.request
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple

from harness.errors import DataError
from harness.locks import exclusive

_SILENCE_SECONDS = 60.0  # without a byte for so long, a server is taken for unreachable
_CHUNK_BYTES = 1 << 20


class Published(NamedTuple):
    """An archive as its authors publish it, with the MD5 sum that they print beside it."""

    url: str
    md5: str


def download(published: Published, root: Path, folder: str, wanted: tuple[str, ...]) -> None:
    """Unpack the files `wanted` into `root / folder`; of many ranks one fetches, the others wait for it.

    The folder appears whole, by rename. Other members of the archive are not unpacked.

    Raises:
        DataError: the network, the sum or the disk says no.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        with exclusive(root / f".{folder}.lock"):
            if (root / folder).is_dir():  # another rank was faster
                return
            with tempfile.TemporaryDirectory(prefix=f".{folder}-", dir=root) as scratch:
                archive = Path(scratch, "archive")
                _fetch(published, archive)
                _unpack(archive, Path(scratch, folder), folder, wanted)
                Path(scratch, folder).rename(root / folder)
    except (
        urllib.error.URLError,
        HTTPException,
        TimeoutError,
        OSError,
        tarfile.TarError,
        ValueError,
    ) as error:
        raise DataError(_refusal(published, root, error)) from None


def _fetch(published: Published, archive: Path) -> None:
    digest = hashlib.md5(usedforsecurity=False)  # the sum that the authors publish
    with (
        urllib.request.urlopen(published.url, timeout=_SILENCE_SECONDS) as answer,  # noqa: S310  an https constant
        archive.open("wb") as file,
    ):
        while chunk := answer.read(_CHUNK_BYTES):
            digest.update(chunk)
            file.write(chunk)
    if digest.hexdigest() != published.md5:
        raise ValueError(f"MD5 of what came is {digest.hexdigest()}, {published.md5} expected")


def _unpack(archive: Path, target: Path, folder: str, wanted: tuple[str, ...]) -> None:
    target.mkdir()
    with tarfile.open(archive) as packed:
        for name in wanted:
            try:
                source = packed.extractfile(f"{folder}/{name}")
            except KeyError:
                source = None
            if source is None:
                raise ValueError(f"the archive has no {folder}/{name}")
            with source, Path(target, name).open("wb") as file:
                shutil.copyfileobj(source, file)


def _refusal(published: Published, root: Path, error: Exception) -> str:
    reason = getattr(error, "reason", None) or error
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        reason = f"no space left; {shutil.disk_usage(root).free // 2**20} MiB are free"
    said = " ".join(str(reason).split()) or type(error).__name__
    return (
        f"{published.url} could not be brought to {root.absolute()}: {said}; download and unpack it "
        f"where there is a network, and name that folder in workload.options.data or KRONSCALE_DATA"
    )
