"""Cells that a command acts on, from a sweep's name or file and `--where`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from harness.cell import Cell
from harness.cli.output import print_left_out
from harness.errors import StoreError, UserError
from harness.runs.commands import command, runs_option
from harness.runs.store import CellFolder, SweepFolder, sweep_folder
from harness.study.filters import select
from harness.study.sweep import read_sweep
from harness.yaml_files.validation_messages import did_you_mean


def selected_cells(
    sweep: str | None, file: Path | None, overrides: Sequence[str], where: Sequence[str], runs: Path
) -> list[Cell]:
    """Cells of one sweep, by the name of its stored runs or by its file.

    Args:
        sweep: `demo`, or `demo/sgd-p2` for those of its cells whose id begins with `sgd-p2`.
        file: instead of the name.
        overrides: of fields of the file.
        where: expressions that all must hold.
        runs: folder of stored runs.

    Raises:
        UserError: neither or both are given, or there is no such sweep or no matching cell.
    """
    if (sweep is None) == (file is None):
        raise UserError("give either the name of a sweep or its file: demo, or -f jobs/sweeps/demo.yaml")
    if file is not None:
        return select(read_sweep(file, overrides).cells, *where)
    if overrides:
        raise UserError("--set overrides fields of a sweep file; give the file with -f")
    return select(stored_cells(sweep or "", runs), *where)


def stored_cells(name: str, runs: Path) -> list[Cell]:
    """The stored cells of a sweep, `demo`, or those whose ids begin as given, `demo/sgd-p2`.

    Prints on standard error how many stored cells this version cannot read.

    Raises:
        UserError: there is no such sweep or cell.
    """
    name, slash, prefix = name.partition("/")
    stored = stored_sweep(name, runs)
    if slash:
        found = [folder.cell() for folder in stored.cell_folders_named(prefix)]
        if not found:
            raise _no_cell(stored.path, prefix)
        return found
    cells, errors = [], []
    for folder in stored.stored():  # every file is read once: there may be 10,000
        try:
            cells.append(folder.cell())
        except StoreError as error:
            errors.append(str(error))
    print_left_out(errors)
    return cells


def stored_sweep(name: str, runs: Path) -> SweepFolder:
    """The folder of a sweep with stored runs.

    Raises:
        UserError: it has no runs.
    """
    folder = sweep_folder(name, runs)
    if not folder.path.is_dir():
        known = stored_sweep_names(runs)
        available = f"available: {', '.join(known)}" if known else "nothing is stored there"
        raise UserError(f"{folder.path}: no runs of sweep {name!r}; {available}{did_you_mean(name, known)}")
    return folder


def stored_sweep_names(runs: Path) -> list[str]:
    """Names of all sweeps with stored runs, also of those that cannot be read."""
    folders = sorted(runs.iterdir()) if runs.is_dir() else []
    return [path.name for path in folders if _may_hold_cells(path)]


def stored_cell(text: str, runs: Path) -> CellFolder:
    """The one stored cell whose id begins with `text`: in any sweep, or in that of `sweep/id`.

    Raises:
        UserError: none does, or several do.
    """
    sweep, slash, prefix = text.rpartition("/")
    names = [stored_sweep(sweep, runs).path.name] if slash else stored_sweep_names(runs)
    found = [folder for name in names for folder in sweep_folder(name, runs).cell_folders_named(prefix)]
    if len(found) > 1:
        some = ", ".join(f"{folder.path.parent.name}/{folder.id}" for folder in found[:3])
        some += " and others" if len(found) > 3 else ""
        raise UserError(f"{len(found)} cells have ids that begin with {text!r}: {some}; give more of the id")
    if not found:
        raise _no_cell(runs / sweep, prefix)
    return found[0]


def _may_hold_cells(path: Path) -> bool:
    try:
        return SweepFolder(path).holds_cells()
    except OSError:  # whoever reads it gets the reason
        return True


def _no_cell(folder: Path, prefix: str) -> UserError:
    """There is no such cell in the folder of a sweep or of all runs."""
    of_all = shlex.join(["kronscale", "status", *runs_option(folder)])
    listing = command("status", folder) if SweepFolder(folder).holds_cells() else of_all
    return UserError(f"no cell in {folder} has an id that begins with {prefix!r}; to list ids: {listing}")
