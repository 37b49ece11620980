"""`kronscale archive`: the runs of a sweep as one file with checksums."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from harness.cli.cell_selection import selected_cells
from harness.cli.options import RUNS, FileInstead, Runs, SweepName, Where
from harness.errors import StoreError, UserError
from harness.runs.archive import SUFFIX, Manifest, read_manifest, write_archive
from harness.runs.commands import command
from harness.runs.store import sweep_folder
from harness.study.cell_states import IN_FLIGHT, stored_states


def archive(
    sweep: SweepName = None,
    file: FileInstead = None,
    runs: Runs = RUNS,
    where: Where = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The archive. Default: archives/<sweep>.tar.xz beside the runs."),
    ] = None,
    with_report: Annotated[
        bool, typer.Option("--report/--no-report", help="Keep the sweep's report, if there is one.")
    ] = True,
    verify: Annotated[
        list[Path] | None,
        typer.Option(
            "--verify", metavar="FILE", help="Check this archive instead of writing one; may be repeated."
        ),
    ] = None,
) -> None:
    """Write the ended runs of a sweep into one file: records, environments, report, and a manifest.

    `report` and `reproduce` read one or several such files in the place of a folder of runs. `--verify`
    loads the archive: every file must match the manifest, and every run its own checksums.
    """
    if verify:
        if sweep or file:
            raise UserError("--verify takes the place of a sweep; it reads archives only")
        _verify(verify)
        return

    cells = selected_cells(sweep, file, (), where or (), runs)
    if not cells:
        raise UserError(f"no cell of {sweep} can be read by this version of Kronscale, so none is archived")
    folder = sweep_folder(cells[0].sweep, runs)
    target = out or runs.parent / "archives" / f"{cells[0].sweep}{SUFFIX}"
    if not target.name.endswith(SUFFIX):
        raise UserError(f"--out={target} must end with {SUFFIX}")
    states = [(cell, stored.state) for cell, stored in stored_states(folder, cells)]
    if busy := [cell.id for cell, state in states if state in IN_FLIGHT]:
        raise UserError(
            f"{len(busy)} cells are pending or running, such as {busy[0]}; wait for them, or leave them out "
            "with --where"
        )
    ended = [folder.cell_folder(cell) for cell, state in states if state != "STAGED"]
    if not ended:
        raise UserError(f"none of the {len(cells)} cells has run, so there is nothing to archive")
    report = folder.path / "report"
    manifest = write_archive(folder, ended, target, report if with_report and report.is_dir() else None)
    left = len(cells) - len(ended)
    typer.echo(
        f"{target}: {len(manifest.cells)} cells, {len(manifest.files)} files, "
        f"{target.stat().st_size / 1e6:.1f} MB" + (f"; {left} cells have not run" if left else "")
    )
    if with_report and not report.is_dir():
        typer.echo(f"it has no figures: there was no report; to add it: {command('report', folder.path)}")


def _verify(paths: list[Path]) -> None:
    for path in paths:
        manifest = _sound(path)
        completed = sum(cell.state == "COMPLETED" for cell in manifest.cells)
        figures = sum(file.path.startswith("report/") for file in manifest.files)
        typer.echo(
            f"{path}: sound; sweep {manifest.sweep}, {len(manifest.cells)} cells, {completed} of them "
            f"COMPLETED, {len(manifest.files)} files, {figures} of them of the report"
        )


def _sound(path: Path) -> Manifest:
    """The manifest of an archive of which every file and every run can be read.

    Raises:
        StoreError: it is damaged, or a run was before it was archived.
    """
    from analysis.records.left_out_notes import quietly  # noqa: PLC0415  pandas is slow to load
    from analysis.records.loading import load  # noqa: PLC0415

    with quietly():
        cells = load(path, cache=False).cells
    for run, why in cells.loc[~cells["valid"], ["run", "why"]].itertuples(index=False):
        raise StoreError(f"{path}: {run}: {why}")
    manifest = read_manifest(path)
    if missing := {cell.id for cell in manifest.cells} - set(cells["cell"]):
        raise StoreError(f"{path}: cell {min(missing)} of its manifest cannot be read")
    return manifest
