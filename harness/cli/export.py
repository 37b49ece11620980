"""`kronscale trace` and `kronscale export`: runs in the formats of other tools."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from harness.errors import UserError

_Sweep = Annotated[str | None, typer.Argument(help="Name of the sweep.", show_default=False)]
_File = Annotated[
    Path | None, typer.Option("--file", "-f", metavar="FILE", help="The sweep's file, in place of its name.")
]
_Where = Annotated[
    str | None, typer.Option(metavar="EXPR", help="Only matching cells: 'method=sgd and seed in 0,1'.")
]
_Runs = Annotated[Path, typer.Option(metavar="DIR", help="Where runs are stored.")]
_Out = Annotated[Path | None, typer.Option(metavar="FILE", help="Where to write. Default: standard output.")]
_RUNS = Path("results/runs")


def register(app: typer.Typer) -> None:
    """Add the verbs to `app`."""
    app.command(epilog="Example: kronscale trace demo --where 'seed=0' --out trace.json")(trace)
    app.command(epilog="Example: kronscale export mllog demo --where 'method=sgd' --out sgd.log")(export)


def trace(
    sweep: _Sweep = None, file: _File = None, where: _Where = None, runs: _Runs = _RUNS, out: _Out = None
) -> None:
    """Write the traced steps of all ranks on one timeline, for ui.perfetto.dev or chrome://tracing."""
    _write("trace", sweep, file, where, runs, out)


def export(
    form: Annotated[str, typer.Argument(help="mllog, openmetrics, layers, or trace.", show_default=False)],
    sweep: _Sweep = None, file: _File = None, where: _Where = None, runs: _Runs = _RUNS, out: _Out = None,
) -> None:  # fmt: skip
    """Write runs in another tool's format."""
    _write(form, sweep, file, where, runs, out)


def _write(
    form: str, sweep: str | None, file: Path | None, where: str | None, runs: Path, out: Path | None
) -> None:
    from harness.cli.cell_selection import chosen_cells  # noqa: PLC0415  --help answers before these are loaded
    from harness.documents.validation_messages import did_you_mean  # noqa: PLC0415
    from harness.exports import EXPORTS  # noqa: PLC0415
    from harness.runs.store import sweep_folder  # noqa: PLC0415

    if form not in EXPORTS:
        raise UserError(f"{form!r} is no format; there are {', '.join(EXPORTS)}{did_you_mean(form, EXPORTS)}")
    cells = chosen_cells(sweep, file, (), where, runs)
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
