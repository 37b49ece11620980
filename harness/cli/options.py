"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from harness.cli import completion

RUNS = Path("results/runs")

SweepFile = Annotated[
    Path,
    typer.Option("--file", "-f", metavar="FILE", help="Sweep file.", autocompletion=completion.sweep_files),
]
SweepName = Annotated[
    str | None,
    typer.Argument(
        help="Name of the sweep, or sweep/cell.",
        metavar="[SWEEP]",
        show_default=False,
        autocompletion=completion.stored_sweeps,
    ),
]
FileInstead = Annotated[
    Path | None,
    typer.Option(
        "--file",
        "-f",
        metavar="FILE",
        help="Sweep file, instead of the sweep's name.",
        autocompletion=completion.sweep_files,
    ),
]
Where = Annotated[
    list[str] | None,
    typer.Option(
        metavar="EXPR", help="Only matching cells: 'method=sgd and seed in 0,1'. If repeated, all must match."
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="FIELD=VALUE",
        help="Override a field of the file: training.epochs=5. Each field once.",
    ),
]
SiteName = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Site profile: a name, or the path of a .yaml file.",
        autocompletion=completion.sites,
    ),
]
Runs = Annotated[Path, typer.Option(metavar="DIR", help="Folder of stored runs.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write all results to this JSON file.")
]
