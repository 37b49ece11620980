"""`kronscale compare`: finds regressions between two sets of results."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli.options import RUNS, AsJson, Runs

if TYPE_CHECKING:
    from rich.table import Table

    from analysis.regressions import Change

REGRESSION = 3


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command(epilog="Example: kronscale compare results/old/demo results/runs/demo")(compare)


def compare(
    before: Annotated[
        str, typer.Argument(metavar="A", help="Runs before the change: a folder, or the name of a sweep.")
    ],
    after: Annotated[
        str, typer.Argument(metavar="B", help="Runs after the change: a folder, or the name of a sweep.")
    ],
    least: Annotated[
        float, typer.Option(metavar="PERCENT", min=0, help="Smaller changes are not regressions.")
    ] = 5.0,
    runs: Runs = RUNS,
    as_json: AsJson = False,
) -> None:
    """Compare the cells that A and B share; exit code 3 if effect size and interval show that B is worse."""
    # imported here so that --help does not load pandas
    from analysis.records.tables import load  # noqa: PLC0415
    from analysis.regressions import changes, differing_environments  # noqa: PLC0415
    from harness.errors import UserError  # noqa: PLC0415

    studies = load(before, runs), load(after, runs)
    found = changes(*studies, least=least / 100)
    if not found:
        raise UserError(
            f"{before} and {after} have no cell in common (seeds aside), so there is nothing to compare"
        )
    worse = [change for change in found if change.verdict == "regression"]
    if as_json:
        typer.echo(json.dumps([asdict(change) | {"verdict": change.verdict} for change in found], indent=1))
    else:
        from harness.cli.output import console  # noqa: PLC0415

        console().print(_table(found))
        for line in differing_environments(*studies):
            typer.echo(f"different environments: {line}")
        decided = sum(change.verdict != "undecided" for change in found)
        typer.echo(
            f"{len(found)} comparisons, {decided} decided, {len(worse)} regressions (of {least:g} % or more)"
        )
    if worse:
        raise typer.Exit(REGRESSION)


def _table(found: list[Change]) -> Table:
    from rich.table import Table  # noqa: PLC0415  # see compare
    from rich.text import Text  # noqa: PLC0415

    from analysis.report.summary import spell  # noqa: PLC0415

    table = Table(box=None)
    for column in ("arm", "ranks", "quantity", "n", "B / A", "p (Holm)", "verdict"):
        table.add_column(column, overflow="fold")
    for change in found:
        p = "–" if change.holm_p is None else f"{change.holm_p:.2g}"
        ratio = spell(change.ratio, "×")
        row = (change.arm, change.world_size, change.quantity, change.ratio.n, ratio, p, change.verdict)
        table.add_row(*(Text(str(cell)) for cell in row))
    return table
