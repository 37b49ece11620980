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
SITE_VARIABLE = "KRONSCALE_SITE"

SiteName = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        envvar=SITE_VARIABLE,
        help="Site profile: a name, or the path of a .yaml file.",
        autocompletion=completion.sites,
    ),
]
LastSite = Annotated[
    str | None,
    typer.Option(
        "--site",
        metavar="NAME",
        envvar=SITE_VARIABLE,
        help="Site profile: a name, or the path of a .yaml file. Default: the sweep's last one; a "
        "new sweep's is local.",
        autocompletion=completion.sites,
    ),
]
Oversubscribe = Annotated[
    float | None,
    typer.Option(
        metavar="TIMES",
        min=1,
        help="On a local site, allow cells that need so many times its CPUs. Default: the profile's.",
    ),
]
Budget = Annotated[
    float | None,
    typer.Option(metavar="HOURS", min=0, help="Submit nothing that could cost more GPU- or core-hours."),
]
Yes = Annotated[bool, typer.Option("--yes", help="Ask nothing, however much it may cost.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be submitted, and its cost.")]
Runs = Annotated[Path, typer.Option(metavar="DIR", help="Folder of stored runs.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
