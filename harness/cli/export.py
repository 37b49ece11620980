"""`kronscale export`: writes runs in the formats of other tools."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from harness.cli.cell_selection import selected_cells
from harness.cli.options import RUNS, FileInstead, Runs, SweepName, Where
from harness.errors import UserError
from harness.runs.store import sweep_folder
from harness.yaml_files.validation_messages import not_allowed

_Out = Annotated[Path | None, typer.Option(metavar="FILE", help="File to write. Default: standard output.")]


def export(
    form: Annotated[
        str, typer.Argument(help="Format: mllog, openmetrics, layers or trace.", show_default=False)
    ],
    sweep: SweepName = None, file: FileInstead = None, where: Where = None, runs: Runs = RUNS,
    out: _Out = None,
) -> None:  # fmt: skip
    """Write runs in the format of another tool."""
    from harness.exports import EXPORTS  # noqa: PLC0415

    if form not in EXPORTS:
        raise UserError(f"{form!r} is not a format{not_allowed(form, EXPORTS)}")
    cells = selected_cells(sweep, file, (), where or (), runs)
    attempts = [
        attempt
        for cell in cells
        if (attempt := sweep_folder(cell.sweep, runs).cell_folder(cell).latest()) is not None
    ]
    text = EXPORTS[form](attempts)
    if out is None:
        typer.echo(text, nl=False)
    else:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
        typer.echo(f"{out}: {len(attempts)} {'run' if len(attempts) == 1 else 'runs'}")
