"""`kronscale compare`: finds regressions between two sets of results."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli.cell_selection import stored_sweep
from harness.cli.options import RUNS, AsJson, Runs
from harness.cli.output import console, print_note, text_table
from harness.errors import UserError
from harness.runs.store import SweepFolder

if TYPE_CHECKING:
    from analysis.records.study import Study

REGRESSION = 3


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
    from analysis.regressions import changes, differing_environments  # noqa: PLC0415  loads pandas
    from analysis.report.tables import spell_ratio  # noqa: PLC0415

    studies = _study(before, runs), _study(after, runs)
    found = changes(*studies, least=least / 100)
    if not found:
        raise UserError(
            f"{before} and {after} have no cell in common (seeds aside), so there is nothing to compare"
        )
    worse = [change for change in found if change.verdict == "regression"]
    if as_json:
        typer.echo(json.dumps([asdict(change) | {"verdict": change.verdict} for change in found], indent=1))
    else:
        rows = (
            (one.arm, one.world_size, one.quantity, one.ratio.n, spell_ratio(one.ratio),
             "–" if one.holm_p is None else f"{one.holm_p:.2g}", one.verdict)
            for one in found
        )  # fmt: skip
        columns = ("arm", "ranks", "quantity", "n", "B / A", "p (Holm)", "verdict")
        console().print(text_table(columns, rows))
        for line in differing_environments(*studies):
            typer.echo(f"different environments: {line}")
        decided = sum(change.verdict != "undecided" for change in found)
        typer.echo(
            f"{len(found)} comparisons, {decided} decided, {len(worse)} regressions (of {least:g} % or more)"
        )
    if worse:
        raise typer.Exit(REGRESSION)


def _study(name: str, runs: Path) -> Study:
    """A stored sweep, or a folder of cells anywhere, of which nothing is cached: it may be someone else's."""
    from analysis.records.left_out_notes import left_out_note, quietly  # noqa: PLC0415
    from analysis.records.loading import load  # noqa: PLC0415

    if len(Path(name).parts) > 1 and not Path(name).is_dir():
        raise UserError(f"no run folder at {name}")
    folder = Path(name) if Path(name).is_dir() else stored_sweep(name, runs).path
    if not SweepFolder(folder).holds_cells():
        raise UserError(f"{folder} holds no cells; give the folder of a sweep, such as {runs / 'demo'}")
    with quietly():
        study = load(folder, cache=folder.resolve().parent == runs.resolve())
    print_note(left_out_note(study.cells))
    return study
