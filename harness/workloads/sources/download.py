"""Published data, brought into a folder once, whoever asks first (no torch)."""

from __future__ import annotations

import errno
import hashlib
import shutil
import tarfile
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple

from harness.errors import DataError
from harness.runs.locks import exclusive

_SILENCE_SECONDS = 60.0  # without a byte for so long, a server is taken for unreachable
_CHUNK_BYTES = 1 << 20


class Published(NamedTuple):
    """A file as its authors publish it.

    Attributes:
        digest: its sum by `algorithm`, in hexadecimal.
    """

    url: str
    digest: str
    algorithm: str = "md5"


def download_archive(published: Published, root: Path, folder: str, wanted: tuple[str, ...]) -> None:
    """Unpack the files `wanted` of an archive into `root / folder`; its other members are not unpacked.

    Of many ranks one fetches, the others wait for it. The folder appears whole, by rename.

    Raises:
        DataError: the network, the sum or the disk says no.
    """
    _bring([published], root, folder, partial(_unpack, folder=folder, wanted=wanted))


def download_files(published: Sequence[Published], root: Path, folder: str) -> None:
    """Put files, each called as in its address, into `root / folder`; the rest as for an archive."""
    _bring(published, root, folder, lambda fetched, target: fetched.rename(target / fetched.name))


def _bring(
    published: Sequence[Published], root: Path, folder: str, place: Callable[[Path, Path], object]
) -> None:
    """Fetch all, hand each to `place` with the folder to fill, and show that folder when it is whole."""
    asked = published[0]
    try:
        root.mkdir(parents=True, exist_ok=True)
        with exclusive(root / f".{folder}.lock"):
            if (root / folder).is_dir():  # another rank was faster
                return
            with tempfile.TemporaryDirectory(prefix=f".{folder}-", dir=root) as scratch:
                target = Path(scratch, folder)
                target.mkdir()
                for asked in published:
                    fetched = Path(scratch, asked.url.rpartition("/")[2])
                    _fetch(asked, fetched)
                    place(fetched, target)
                target.rename(root / folder)
    except (
        urllib.error.URLError,
        HTTPException,
        TimeoutError,
        OSError,
        tarfile.TarError,
        ValueError,
    ) as error:
        raise DataError(_refusal(asked, root, error)) from None


def _fetch(published: Published, path: Path) -> None:
    digest = hashlib.new(published.algorithm, usedforsecurity=False)  # against damage: https is the guard
    with (
        urllib.request.urlopen(published.url, timeout=_SILENCE_SECONDS) as answer,  # noqa: S310  an https constant
        path.open("wb") as file,
    ):
        while chunk := answer.read(_CHUNK_BYTES):
            digest.update(chunk)
            file.write(chunk)
    if digest.hexdigest() != published.digest:
        name = published.algorithm.upper()
        raise ValueError(f"{name} of what came is {digest.hexdigest()}, {published.digest} expected")


def _unpack(archive: Path, target: Path, *, folder: str, wanted: tuple[str, ...]) -> None:
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
        f"{published.url} could not be brought to {root.absolute()}: {said}; download it where there is a "
        f"network, unpack an archive, and name that folder in workload.options.data or KRONSCALE_DATA"
    )
