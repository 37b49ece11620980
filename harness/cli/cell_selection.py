"""Cells that a command acts on, from a sweep's name or file and `--where`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from harness.cell import Cell
from harness.errors import UserError
from harness.runs.store import CellFolder, SweepFolder, sweep_folder
from harness.yaml_files.validation_messages import did_you_mean


def selected_cells(
    sweep: str | None, file: Path | None, overrides: Sequence[str], where: str | None, runs: Path
) -> list[Cell]:
    """Cells of one sweep, by the name of its stored runs or by its file.

    Raises:
        UserError: neither or both are given, or there is no such sweep or no matching cell.
    """
    from harness.cli.output import print_left_out  # noqa: PLC0415  loads rich
    from harness.study.filters import select  # noqa: PLC0415

    if (sweep is None) == (file is None):
        raise UserError("give either the name of a sweep or its file: demo, or -f jobs/sweeps/demo.yaml")
    if file is not None:
        from harness.study.sweep import read_sweep  # noqa: PLC0415

        return select(read_sweep(file, overrides).cells, where)
    if overrides:
        raise UserError("--set overrides fields of a sweep file; give the file with -f")
    stored = stored_sweep(sweep or "", runs)
    print_left_out(stored)
    return select([folder.cell() for folder in stored.cell_folders()], where)


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
    """Names of all sweeps with stored runs."""
    folders = sorted(runs.iterdir()) if runs.is_dir() else []
    return [path.name for path in folders if SweepFolder(path).holds_cells()]


def stored_cell(prefix: str, runs: Path) -> CellFolder:
    """The one stored cell, in any sweep, whose id begins with `prefix`.

    Raises:
        UserError: none does, or several do.
    """
    sweeps = [sweep_folder(name, runs) for name in stored_sweep_names(runs)]
    found = [folder for sweep in sweeps for folder in sweep.cell_folders() if folder.id.startswith(prefix)]
    if not found:
        raise UserError(
            f"no cell in {runs} has an id that begins with {prefix!r}; kronscale status lists the ids"
        )
    if len(found) > 1:
        some = ", ".join(f"{folder.path.parent.name}/{folder.id}" for folder in found[:3])
        some += " and others" if len(found) > 3 else ""
        raise UserError(
            f"{len(found)} cells have ids that begin with {prefix!r}: {some}; give more of the id"
        )
    return found[0]
