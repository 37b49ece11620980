"""What the shell offers while a line is typed; only lists folders, so that it answers at once.

`kronscale --install-completion` sets it up.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import typer

from harness.shipped import find_all

_CELL = re.compile(r".+-p[0-9]+-s[0-9]+-[0-9a-f]{10}")  # `Cell.id`; no cell is read


def sweep_files(incomplete: str) -> list[str]:
    """Sweep files of the project; the shell itself completes other paths."""
    folders = ((Path("jobs/sweeps"), "*.yaml"), (Path("jobs/papers"), "*/*/*.yaml"))
    found = (folder / path for folder, pattern in folders for path in find_all(folder, pattern))
    return _beginning(incomplete, map(str, found))


def sites(incomplete: str) -> list[str]:
    """Names of site profiles."""
    return _beginning(incomplete, (path.stem for path in find_all(Path("jobs/sites"), "*.yaml")))


def stored_sweeps(ctx: typer.Context, incomplete: str) -> list[str]:
    """Names of sweeps with stored runs; behind a slash, their cells."""
    runs = _runs(ctx)
    if "/" in incomplete:
        return _beginning(incomplete, _cells(runs, incomplete.partition("/")[0], full=True))
    return _beginning(incomplete, _sweeps(runs))


def stored_cells(ctx: typer.Context, incomplete: str) -> list[str]:
    """Ids of stored cells, as `sweep/cell` where a sweep's name or nothing is typed."""
    runs = _runs(ctx)
    names = list(_sweeps(runs))
    if "/" in incomplete:
        names = [incomplete.partition("/")[0]]
    full = _beginning(incomplete, (cell for name in names for cell in _cells(runs, name, full=True)))
    return full or _beginning(incomplete, (cell for name in names for cell in _cells(runs, name, full=False)))


def papers(incomplete: str) -> list[str]:
    """Papers with sweeps."""
    return _beginning(incomplete, {path.parent.name for path in find_all(Path("jobs/papers"), "*/*.yaml")})


def paper_sizes(ctx: typer.Context, incomplete: str) -> list[str]:
    """Sizes of the paper that is typed already."""
    paper = str(ctx.params.get("paper") or "*")
    return _beginning(incomplete, {path.stem for path in find_all(Path("jobs/papers"), f"{paper}/*.yaml")})


def _runs(ctx: typer.Context) -> Path:
    return Path(str(ctx.params.get("runs") or "results/runs"))


def _sweeps(runs: Path) -> Iterator[str]:
    return (name for name in _folders(runs) if any(map(_CELL.fullmatch, _folders(runs / name))))


def _cells(runs: Path, sweep: str, *, full: bool) -> Iterator[str]:
    return (f"{sweep}/{name}" if full else name for name in _folders(runs / sweep) if _CELL.fullmatch(name))


def _folders(path: Path) -> Iterator[str]:
    try:
        with os.scandir(path) as entries:
            yield from (entry.name for entry in entries if entry.is_dir())
    except OSError:  # nothing is offered where nothing can be read
        return


def _beginning(incomplete: str, names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if name.startswith(incomplete))
