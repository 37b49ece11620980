"""What `analysis.load` is given: folders of sweeps or of all runs, names of sweeps, and archives."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from harness.errors import StoreError
from harness.runs.archive import is_archive
from harness.runs.store import SweepFolder

PathLike = str | os.PathLike[str]


def flat(paths: Iterable[PathLike | Iterable[PathLike]]) -> list[PathLike]:
    """Paths one by one, of which some may have been given in a list.

    Raises:
        StoreError: there is none, or one is empty, which would mean the current directory.
    """
    found = [one for given in paths for one in _each(given)]
    if not found or any(not str(one) for one in found):
        got = "an empty path" if found else "nothing"
        raise StoreError(
            f"{got} to load; give folders of sweeps, the folder of all runs, names of sweeps or archives"
        )
    return found


def sources(paths: Iterable[PathLike], root: Path) -> tuple[list[Path], list[Path]]:
    """The folders of sweeps and the archives that `paths` stand for, each once.

    Args:
        paths: as for `analysis.load`.
        root: folder of stored runs, for names of sweeps.

    Raises:
        StoreError: a path does not exist, or is a folder inside of a sweep.
    """
    folders: dict[Path, Path] = {}
    archives: dict[Path, Path] = {}
    for path in map(Path, paths):
        if is_archive(path):
            archives.setdefault(path.resolve(), path)
        else:
            for folder in _sweeps(path, root):
                folders.setdefault(folder.resolve(), folder)
    return list(folders.values()), list(archives.values())


def unreadable_note(folder: Path, read: int) -> str:
    """How many stored cells cannot be read, and why the first; empty if all can.

    Args:
        folder: of the sweep.
        read: how many cells were read, so that no cell is parsed a second time if these are all.
    """
    stored = sum(1 for _ in SweepFolder(folder).stored())
    if stored == read:
        return ""
    errors = SweepFolder(folder).unreadable()
    verb = "runs are" if stored > 1 else "run is"
    return f"{stored - read} of {stored} {verb} left out, as if they were not stored: {'; '.join(errors[:1])}"


def _each(given: PathLike | Iterable[PathLike]) -> Iterator[PathLike]:
    if isinstance(given, str | os.PathLike):
        yield given
    else:
        yield from given


def _sweeps(path: Path, root: Path) -> list[Path]:
    """The folder of a sweep, or the folders of all sweeps in a folder of runs; an empty folder is a sweep."""
    places = [place for place in (path, root / path) if place.is_dir()]
    for place in places:
        if SweepFolder(place).holds_cells():
            return [place]
        for runs in (place, place / "runs"):
            below = sorted(runs.iterdir()) if runs.is_dir() else []
            if found := [one for one in below if one.is_dir() and SweepFolder(one).holds_cells()]:
                return found
    if not places:
        also = f" nor at {root / path}" if len(path.parts) == 1 else ""
        raise StoreError(f"no run folder at {path}{also}; `kronscale run` or `submit` makes one")
    for inside in (places[0], *places[0].absolute().parents[:1]):
        if (inside / "cell.json").is_file():
            raise StoreError(
                f"{path} belongs to one cell; give the folder of its sweep, {inside.absolute().parent}, and "
                "select with Study.only"
            )
    return places[:1]
