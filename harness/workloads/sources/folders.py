"""Folders of data, and those that are written once: caches, downloads, local copies; shards (no torch)."""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from harness.errors import DataError
from harness.runs.locks import exclusive
from harness.workloads.description import FILES

DATA_VARIABLE, CACHE_VARIABLE, STAGING_VARIABLE = "KRONSCALE_DATA", "KRONSCALE_CACHE", "KRONSCALE_STAGING"
DEFAULT = "data"
EMBEDDED_FOLDER = Path(__file__).parents[1] / "embedded"
_TIMEOUT_SECONDS = 60.0  # without a byte from the server


def data_folder(option: str) -> Path:
    """The folder that the option `data` means.

    A path in the option is part of the cell and of its hash. `files` means the folder that the variable
    KRONSCALE_DATA names (a site profile's `environment` sets it), or `data` in the working directory.
    """
    named = os.environ.get(DATA_VARIABLE) or DEFAULT if option == FILES else option
    return Path(os.path.expandvars(named)).expanduser()


def how_to_point(option: str) -> str:
    """End of an error message about missing data: how to name another folder."""
    if option == FILES:
        return f"or name your copy's folder in {DATA_VARIABLE} or in workload.options.data"
    return "or name another folder in workload.options.data"


def publish_folder(target: Path, fill: Callable[[Path], object], *, what: str, advice: str) -> Path:
    """Return `target`, after writing it if it does not exist.

    One process holds a lock, fills a folder beside `target` and renames it; the others wait for the lock.
    What a failed or killed process wrote is removed, so that `target` is always complete.

    Args:
        target: the folder; its parents are created.
        fill: writes the content into the folder that it is given.
        what: the content, for the error message.
        advice: end of the error message: what the user can do.

    Raises:
        DataError: the disk, the network or an archive failed.
    """
    try:
        if not target.is_dir():
            target.parent.mkdir(parents=True, exist_ok=True)
            with exclusive(target.with_name(f".{target.name}.lock")):
                if not target.is_dir():  # another process may have written it while this one waited
                    _write(target, fill)
    except (OSError, tarfile.TarError) as error:
        folder = target.parent.absolute()
        raise DataError(
            f"{what} could not be written to {folder}: {_reason(error, folder)}; {advice}"
        ) from None
    return target


def unpack(archive: tarfile.TarFile, folder: Path) -> None:
    """Extract all members into `folder`; nothing is written outside it.

    Filters came with Python 3.11.4, and Debian 12 has 3.11.2: there only regular files and folders are
    extracted.

    Raises:
        tarfile.TarError: a member would lie outside the folder, or is of another type.
    """
    if hasattr(tarfile, "data_filter"):
        archive.extractall(folder, filter="data")
        return
    root = folder.resolve()
    for member in archive:
        inside = (root / member.name).resolve().is_relative_to(root)
        if not (inside and (member.isreg() or member.isdir())):
            raise tarfile.ExtractError(f"{member.name!r} is not a regular file or folder inside {folder}")
        archive.extract(member, folder, set_attrs=False)


def _write(target: Path, fill: Callable[[Path], object]) -> None:
    unfinished = target.with_name(f"{target.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed
    try:
        unfinished.mkdir()
        fill(unfinished)
        unfinished.rename(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _reason(error: Exception, folder: Path) -> str:
    text = " ".join(str(error).split())
    if "No space left" in text:  # shutil.copytree collects the errors of many files as text
        return f"no space left, {shutil.disk_usage(folder).free / 2**20:.3g} MiB are free"
    return text[:300] or type(error).__name__


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


def build_shard(folder: Path) -> Path | None:
    """Write `<folder>.tar` beside the folder, and its SHA-256 in `<folder>.tar.sha256`.

    The same files give the same bytes. A shard that has a checksum is complete and is kept.

    Returns:
        The shard; None if there was one.

    Raises:
        DataError: the folder is missing or empty, or the shard cannot be written.
    """
    shard = folder.with_name(f"{folder.name}.tar")
    if shard.is_file() and checksum_file(shard).is_file():
        return None
    files = sorted(_files(folder)) if folder.is_dir() else []
    if not files:
        raise DataError(f"{folder} has no file, so there is nothing to pack")
    temporary = shard.with_name(f".{shard.name}.part")
    try:
        with tarfile.open(temporary, "w", format=tarfile.PAX_FORMAT) as archive:
            for name in files:
                member = tarfile.TarInfo(name)
                member.size, member.mode = (folder / name).stat().st_size, 0o644
                with (folder / name).open("rb") as file:
                    archive.addfile(member, file)
        temporary.replace(shard)
        checksum_file(shard).write_text(f"{_sha256(shard)}  {shard.name}\n")
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise DataError(f"{shard} cannot be written: {error.strerror or error}; free some space") from None
    return shard


def check_shard(shard: Path) -> str | None:
    """Why a shard is not what was written; None if it is, or has no checksum."""
    written = checksum_file(shard)
    if not written.is_file():
        return None
    expected, got = written.read_text().split(maxsplit=1)[0], _sha256(shard)
    return None if expected == got else f"{shard} has the SHA-256 {got}, {written.name} says {expected}"


def checksum_file(shard: Path) -> Path:
    """Where a shard's checksum is, as `sha256sum --check` reads it."""
    return shard.with_name(f"{shard.name}.sha256")


def _files(folder: Path) -> Iterator[str]:
    for parent, _, names in os.walk(folder, followlinks=True):
        for name in names:
            if not name.startswith("."):
                yield Path(parent, name).relative_to(folder).as_posix()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
