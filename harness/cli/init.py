"""`kronscale init`: starts a study folder."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from harness.study.new_study import start_study


def init(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder of the study; `.` is this one.", show_default=False)
    ],
) -> None:
    """Start a study folder with a sweep, a site profile, a README and a .gitignore."""
    for path in start_study(folder):
        typer.echo(path)
    go = "" if folder.resolve() == Path.cwd() else f"cd {shlex.quote(str(folder))} && "
    typer.echo(f"next: {go}kronscale plan -f jobs/sweeps/first.yaml")
