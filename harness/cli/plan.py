"""`kronscale plan`: what a sweep file would run; changes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from harness.cell import Cell
    from harness.launchers.site import Site
    from harness.study.plan_summary import PlanSummary
    from harness.study.sweep import Sweep

_FIRST_CELLS = 5


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command(epilog="Example: kronscale plan -f jobs/sweeps/demo.yaml --where 'world_size>=2'")(plan)


def plan(
    file: Annotated[Path, typer.Option("--file", "-f", metavar="FILE", help="The sweep file.")],
    where: Annotated[
        str | None, typer.Option(metavar="EXPR", help="Only matching cells: 'method=sgd and seed in 0,1'.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Override: training.epochs=5.")
    ] = None,
    site: Annotated[
        str | None, typer.Option(metavar="NAME", help="Say what this site could not run.")
    ] = None,
    runs: Annotated[Path, typer.Option(metavar="DIR", help="Where runs are stored.")] = Path("results/runs"),
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    every: Annotated[bool, typer.Option("--all", help="List every cell.")] = False,
) -> None:
    """Show what a sweep file would run, and what of it is done. Changes nothing."""
    # --help answers before pydantic and rich are loaded
    from harness.cli.output import console  # noqa: PLC0415
    from harness.launchers.site_profiles import read_site  # noqa: PLC0415
    from harness.runs.arms import differences  # noqa: PLC0415
    from harness.study.filters import select  # noqa: PLC0415
    from harness.study.plan_summary import plan_summary  # noqa: PLC0415
    from harness.study.sweep import read_sweep  # noqa: PLC0415

    sweep = read_sweep(file, set_ or ())
    profile = read_site(site) if site else None
    seen = plan_summary(select(sweep.cells, where), runs)
    differs = differences(seen.cells)
    if as_json:
        about = {"sweep": sweep.name, "about": sweep.about, "file": str(sweep.path)}
        content = seen.to_json()
        content["cells"] = [{**cell, "differs": differs[cell["id"]]} for cell in content["cells"]]
        typer.echo(json.dumps({**about, **content}, indent=1))
        return
    screen = console()
    _print_summary(screen, sweep, seen)
    _print_grid(screen, seen)
    if profile is not None:
        screen.print(_site_in_words(profile, seen), markup=False)
    _print_cells(seen, differs, every)


def _print_summary(screen: Console, sweep: Sweep, seen: PlanSummary) -> None:
    cells = len(seen.cells)
    states = ", ".join(f"{count} {state}" for state, count in seen.counts.items())
    targets = {_target_in_words(cell) for cell in seen.cells}
    batches = sorted({cell.training.batch_sizes(cell.world_size) for cell in seen.cells})
    screen.print(f"{sweep.name}: {sweep.about}" if sweep.about else sweep.name, markup=False)
    screen.print(f"{cells} {'cell' if cells == 1 else 'cells'}: {states}")
    screen.print(f"target: {'; '.join(sorted(targets))}", markup=False)
    screen.print(f"batch, global (local): {', '.join(f'{whole} ({local})' for whole, local in batches)}")
    screen.print(f"ranks: {seen.total_ranks} in all cells, {seen.largest_world} in the largest")


def _target_in_words(cell: Cell) -> str:
    sign = ">=" if cell.target.direction == "higher" else "<="
    return f"{cell.target.metric} {sign} {cell.target.value:g} on {cell.workload.name}"


def _print_grid(screen: Console, seen: PlanSummary) -> None:
    from rich.table import Table  # noqa: PLC0415  see plan

    table = Table(box=None, pad_edge=False)
    table.add_column("cells by world size", overflow="fold")
    for size in seen.world_sizes:
        table.add_column(str(size), justify="right")
    for method, row in seen.grid().items():
        table.add_row(method, *(str(row.get(size, "-")) for size in seen.world_sizes))
    screen.print()
    screen.print(table)
    screen.print()
    for method, words in seen.placements().items():
        screen.print(f"{method}: {words}", markup=False)
    screen.print()


def _print_cells(seen: PlanSummary, differs: dict[str, str], every: bool) -> None:
    shown = seen.cells if every else seen.cells[:_FIRST_CELLS]
    lines = [f"{seen.states[cell.id]:<8}{cell.id}  {differs[cell.id]}".rstrip() for cell in shown]
    if len(shown) < len(seen.cells):
        lines.append(f"... and {len(seen.cells) - len(shown)} more; --all lists them")
    typer.echo("\n".join(lines))  # as it is: an id folded at the terminal's edge could not be copied


def _site_in_words(site: Site, seen: PlanSummary) -> str:
    from harness.errors import SiteError  # noqa: PLC0415  see plan
    from harness.launchers import LAUNCHERS  # noqa: PLC0415

    launcher = LAUNCHERS[site.launcher]
    refusals: list[str] = []
    oversubscribed = 0
    for cell in seen.cells:
        try:
            launcher.check(cell, site)
            oversubscribed += launcher.plan(cell, site).oversubscribed
        except SiteError as error:
            refusals.append(str(error))
    said = [f"{oversubscribed} cells run oversubscribed"] if oversubscribed else []
    if refusals:
        first = "the first: " if len(refusals) > 1 else ""
        said.append(f"{len(refusals)} of {len(seen.cells)} cells are refused, {first}{refusals[0]}")
    return f"site {site.name}: {'; '.join(said) or 'every cell fits'}"
