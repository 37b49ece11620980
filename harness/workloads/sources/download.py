"""Downloads of published data sets, checked against their checksums (no torch)."""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from harness.workloads.sources.publish import publish_folder, unpack

_TIMEOUT_SECONDS = 60.0  # without a byte from the server


class Published(NamedTuple):
    """A file as its authors publish it.

    Attributes:
        checksum: algorithm and hexadecimal digest, `md5:...`.
    """

    url: str
    checksum: str

    @property
    def name(self) -> str:
        """Its file name."""
        return self.url.rpartition("/")[2]


def download_archive(archive: Published, target: Path) -> None:
    """Unpack the folder `target.name` of a tar archive as `target`.

    Of several ranks one downloads; the others wait.

    Raises:
        DataError: the network or the disk failed, or the checksum differs.
    """

    def fill(folder: Path) -> None:
        _fetch(archive, folder)
        with tarfile.open(folder / archive.name) as packed:
            unpack(packed, folder)
        (folder / archive.name).unlink()
        for path in (folder / target.name).iterdir():
            path.rename(folder / path.name)
        (folder / target.name).rmdir()

    _publish(archive.url, target, fill)


def download_files(files: Sequence[Published], target: Path) -> None:
    """Download files into the folder `target`; otherwise as `download_archive`."""

    def fill(folder: Path) -> None:
        for file in files:
            _fetch(file, folder)

    _publish(files[0].url.rpartition("/")[0], target, fill)


def _publish(what: str, target: Path, fill: Callable[[Path], None]) -> None:
    advice = (
        "download it where there is a network, unpack an archive, and name its folder in "
        "workload.options.data or KRONSCALE_DATA"
    )
    publish_folder(target, fill, what=what, advice=advice)


def _fetch(file: Published, folder: Path) -> None:
    import pooch  # noqa: PLC0415  slow to import, and only downloads need it

    downloader = pooch.HTTPDownloader(timeout=_TIMEOUT_SECONDS)
    try:
        pooch.retrieve(file.url, file.checksum, file.name, folder, downloader=downloader)
    except ValueError as error:  # the checksum differs, which is a failed download like any other
        raise OSError(str(error)) from error
