"""Archives: the runs of a sweep as one compressed file, with a manifest of checksums.

`manifest.json` comes first and names every other file with its SHA-256. Runs lie below `runs/<sweep>/` as in
the folder of runs, without logs, heartbeats and checkpoints; the report, if it is kept, below `report/`. The
same runs give the same bytes. Archives of the same sweep, made on several machines, are read together.
"""

from __future__ import annotations

import hashlib
import io
import json
import lzma
import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path, PurePosixPath

from harness.cell import NAME_PATTERN
from harness.errors import StoreError
from harness.runs.store import CellFolder, SweepFolder
from harness.runs.stored_files import STRICT, Count, parse_as, read_bytes

SUFFIX = ".tar.xz"
MANIFEST = "manifest.json"
SCHEMA = 1

_KEPT = re.compile(r"[a-z_]+\.json|rank-\d{5,}\.jsonl")  # of an attempt
_NEVER_KEPT = "rendezvous.json"  # a secret


@dataclass(frozen=True)
class ArchivedFile:
    """A file of an archive."""

    __pydantic_config__ = STRICT
    path: str
    bytes: Count
    sha256: str


@dataclass(frozen=True)
class ArchivedCell:
    """A cell of an archive.

    Attributes:
        state: of its latest attempt.
        seed: also the number of its block.
        host: where it was launched.
    """

    __pydantic_config__ = STRICT
    id: str
    method: str
    world_size: Count
    seed: Count
    state: str
    host: str


@dataclass(frozen=True)
class Manifest:
    """What an archive holds.

    Attributes:
        version: of Kronscale that wrote it.
    """

    __pydantic_config__ = STRICT
    schema: Count
    sweep: str
    version: str
    cells: tuple[ArchivedCell, ...]
    files: tuple[ArchivedFile, ...]


def write_archive(
    sweep: SweepFolder, cells: Sequence[CellFolder], out: Path, report: Path | None = None
) -> Manifest:
    """Write the runs of `cells` into one file.

    Args:
        sweep: the sweep's folder.
        cells: those to keep; the last attempt of each must have ended. One before it without an outcome was
            killed with its supervisor.
        out: must not exist.
        report: folder whose files are kept, too.

    Raises:
        StoreError: a cell has no attempt, its last one has not ended, or `out` exists.
    """
    if out.exists():
        raise StoreError(f"{out} exists; archives are not overwritten: remove it, or give another --out")
    found = {f"runs/{sweep.path.name}/{name}": path for name, path in _files_of(sweep, cells)}
    if report is not None:
        found |= {
            f"report/{path.relative_to(report).as_posix()}": path
            for path in sorted(report.rglob("*"))
            if path.is_file()
        }
    found = dict(sorted(found.items()))
    files = tuple(_archived_file(name, path) for name, path in found.items())
    described = tuple(sorted((_described(folder) for folder in cells), key=lambda cell: cell.id))
    manifest = Manifest(SCHEMA, sweep.path.name, version("kronscale"), described, files)
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.name}.part")
    try:
        _write(temporary, manifest, found)
        temporary.replace(out)
    finally:
        temporary.unlink(missing_ok=True)
    return manifest


def read_manifest(path: Path) -> Manifest:
    """The manifest of an archive.

    Raises:
        StoreError: it is no archive, is damaged, or was written by a newer version.
    """
    with _opened(path) as archive:
        return _manifest(path, archive)


def unpack(archives: Sequence[Path], into: Path) -> dict[Path, str]:
    """Unpack the runs of archives into a new folder, each file after its checksum was verified.

    Args:
        archives: of the same or of different sweeps.
        into: gets a folder for each sweep, `<sweep>/<cell id>/...`.

    Returns:
        By folder of a cell, the name of the archive that it comes from.

    Raises:
        StoreError: an archive is damaged, or two have different runs of one cell.
    """
    origin: dict[Path, str] = {}
    known: dict[str, tuple[str, str]] = {}
    for path in archives:
        with _opened(path) as archive:
            manifest = _manifest(path, archive)
            for name, content, digest in _verified(path, archive, manifest):
                parts = PurePosixPath(name).parts
                if parts[0] != "runs":
                    continue
                other, before = known.setdefault(name, (path.name, digest))
                if before != digest:
                    raise StoreError(
                        f"{path}: {'/'.join(parts[1:3])} is another run than in {other}: a cell was run "
                        "twice; leave one of the two archives out"
                    )
                file = into.joinpath(*parts[1:])
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content)
                origin[into.joinpath(*parts[1:3])] = path.name
    return origin


def is_archive(path: Path) -> bool:
    """Whether a path is one of an archive, by its name."""
    return path.name.endswith(SUFFIX)


def _write(path: Path, manifest: Manifest, found: Mapping[str, Path]) -> None:
    with (
        lzma.open(path, "wb", preset=9) as stream,
        tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        _add(archive, MANIFEST, json.dumps(asdict(manifest), indent=1).encode())
        for file in manifest.files:  # read a second time, so that large studies need no memory
            content = read_bytes(found[file.path])
            if hashlib.sha256(content).hexdigest() != file.sha256:
                raise StoreError(f"{found[file.path]} was changed while it was archived; archive again")
            _add(archive, file.path, content)


def _archived_file(name: str, path: Path) -> ArchivedFile:
    content = read_bytes(path)
    return ArchivedFile(name, len(content), hashlib.sha256(content).hexdigest())


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)  # no owner and no date: the same runs give the same bytes
    member.size, member.mode = len(content), 0o644
    archive.addfile(member, io.BytesIO(content))


def _files_of(sweep: SweepFolder, cells: Sequence[CellFolder]) -> Iterator[tuple[str, Path]]:
    for folder in cells:
        attempts = folder.attempts()
        if not attempts:
            raise StoreError(f"{folder.path} has no attempt, so there is nothing to archive")
        yield f"{folder.id}/cell.json", folder.path / "cell.json"
        if attempts[-1].outcome() is None:
            raise StoreError(f"{attempts[-1].path} has not ended; archive it when it has, or leave it out")
        for attempt in attempts:
            for path in sorted(attempt.path.iterdir()):
                if _KEPT.fullmatch(path.name) and path.name != _NEVER_KEPT and path.is_file():
                    yield path.relative_to(sweep.path).as_posix(), path


def _described(folder: CellFolder) -> ArchivedCell:
    cell, attempt = folder.cell(), folder.attempts()[-1]
    outcome, launch = attempt.outcome(), attempt.read("launch.json") or {}
    assert outcome is not None  # noqa: S101  as `_files_of` has checked
    host = str(launch.get("host", ""))
    return ArchivedCell(cell.id, cell.method, cell.world_size, cell.seed, outcome.state, host)


@contextmanager
def _opened(path: Path) -> Iterator[tarfile.TarFile]:
    """An archive, open for reading; errors of the formats become the store's."""
    if not path.exists():
        raise StoreError(f"{path}: no such archive")
    try:
        with tarfile.open(path, "r:xz") as archive:
            yield archive
    except (tarfile.TarError, lzma.LZMAError, EOFError) as error:
        message = f"{path} is damaged or not an archive: {error or type(error).__name__}"
        raise StoreError(message) from None


def _manifest(path: Path, archive: tarfile.TarFile) -> Manifest:
    member = archive.next()
    if member is None or member.name != MANIFEST or not member.isreg():
        raise StoreError(f"{path} must begin with {MANIFEST}; it is not an archive of `kronscale archive`")
    stream = archive.extractfile(member)
    manifest = parse_as(Manifest, stream.read() if stream else b"", path, MANIFEST)
    if manifest.schema > SCHEMA:
        raise StoreError(
            f"{path} has schema {manifest.schema}; this version reads {SCHEMA}: update Kronscale"
        )
    if not re.fullmatch(NAME_PATTERN, manifest.sweep):
        raise StoreError(f"{path}, {MANIFEST}: sweep={manifest.sweep!r} is not the name of a sweep")
    return manifest


def _verified(path: Path, archive: tarfile.TarFile, manifest: Manifest) -> Iterator[tuple[str, bytes, str]]:
    """Name, content and checksum of every file of the manifest; none may be missing or added."""
    expected = {file.path: file for file in manifest.files}
    for member in archive:
        if member.name == MANIFEST:
            continue
        file = expected.pop(member.name, None)
        if file is None or not member.isreg() or member.size != file.bytes:
            raise StoreError(f"{path}: {member.name!r} is not as {MANIFEST} lists it")
        inside = member.name.startswith((f"runs/{manifest.sweep}/", "report/"))
        if not inside or ".." in PurePosixPath(member.name).parts:
            raise StoreError(f"{path}: {member.name!r} lies outside of the folders of an archive")
        stream = archive.extractfile(member)
        content = stream.read() if stream else b""
        if hashlib.sha256(content).hexdigest() != file.sha256:
            raise StoreError(f"{path}: {member.name} does not have the checksum in {MANIFEST}")
        yield member.name, content, file.sha256
    if expected:
        raise StoreError(f"{path}: {len(expected)} files of {MANIFEST} are missing, such as {min(expected)}")
