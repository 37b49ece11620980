"""`kronscale bench gpu`: acceptance of this project on a GPU; `make gpu` is the same without this command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from harness.bench.gpu.acceptance import Acceptance
from harness.bench.gpu.parts import PARTS

_Checkout = Annotated[str | None, typer.Option(metavar="DIR", help="Checkout of this public K-FAC package.")]


def gpu(
    device: Annotated[str, typer.Option(help="cuda, or cpu for a rehearsal on small sizes.")] = "cuda",
    parts: Annotated[
        str | None, typer.Option(help=f"Parts, separated by commas: {', '.join(PARTS)}. Default: all.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of the results. Default: results/gpu.")
    ] = None,
    minutes: Annotated[float, typer.Option(help="Limit for all parts together.")] = 25.0,
    again: Annotated[bool, typer.Option("--again", help="Also run parts that have passed.")] = False,
    data: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="CIFAR-10's batch files. Default: an embedded part of it."),
    ] = None,
    gpauloski: _Checkout = None,
    lzhangbv: _Checkout = None,
) -> None:
    """Check a GPU: exactness, timing, speed and training; exits with 1 if a part fails, 3 if time ends."""
    from harness.cli.output import console  # noqa: PLC0415  loads rich

    names = tuple(name for name in (parts or "").split(",") if name)
    chosen = Acceptance(device, names, out, minutes, again, data, gpauloski, lzhangbv)
    screen = console()
    raise typer.Exit(chosen.run(lambda line: screen.print(line, highlight=False, markup=False)))
