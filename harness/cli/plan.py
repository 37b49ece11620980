"""`kronscale plan`: shows what a sweep file would run; changes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from harness.cli.cost_consent import cost_in_words
from harness.cli.options import RUNS, AsJson, LastSite, Overrides, Runs, SweepFile, Where
from harness.cli.output import console, print_by_state, print_line
from harness.cli.submissions import bfloat16_note
from harness.errors import SiteError
from harness.launchers import LAUNCHERS
from harness.runs.arms import differences
from harness.runs.store import sweep_folder
from harness.study.expected_cost import expected_cost
from harness.study.filters import select
from harness.study.plan_summary import plan_summary, planned_comparisons
from harness.study.site_choice import chosen_site
from harness.study.sweep import read_sweep

if TYPE_CHECKING:
    from rich.console import Console

    from harness.cell import Cell
    from harness.launchers.site_profile import Site
    from harness.study.plan_summary import PlannedComparisons, PlanSummary
    from harness.study.sweep import Sweep, SweepContent, TuningContent

_FIRST_CELLS = 5


def plan(
    file: SweepFile,
    where: Where = None,
    set_: Overrides = None,
    site: LastSite = None,
    runs: Runs = RUNS,
    as_json: AsJson = False,
    every: Annotated[bool, typer.Option("--all", help="List every cell.")] = False,
) -> None:
    """Show what a sweep file would run, what it could cost and what is completed; changes nothing."""
    sweep = read_sweep(file, set_ or ())
    summary = plan_summary(select(sweep.cells, *(where or ())), runs)
    profile = _site(site, sweep.name, runs)
    differs = differences(summary.cells)
    if as_json:
        about = {"sweep": sweep.name, "about": sweep.about, "file": str(sweep.path)}
        content = summary.to_json()
        content["cells"] = [{**cell, "differs": differs[cell["id"]]} for cell in content["cells"]]
        typer.echo(json.dumps({**about, **content}, indent=1))
        return
    screen = console()
    _print_summary(screen, sweep, summary)
    if sweep.content.tuning is None:
        screen.print(_power_in_words(planned_comparisons(summary.cells, runs)), markup=False)
    else:
        screen.print(_tuning_in_words(sweep.content, sweep.content.tuning, file), markup=False)
    _print_grid(screen, summary)
    print_line(screen, _site_in_words(profile, summary))
    _print_cells(screen, summary, differs, every)


def _print_summary(screen: Console, sweep: Sweep, summary: PlanSummary) -> None:
    cells = len(summary.cells)
    states = ", ".join(f"{count} {state}" for state, count in summary.counts.items())
    targets = {_target_in_words(cell) for cell in summary.cells}
    batches = sorted({cell.training.batch_sizes(cell.world_size) for cell in summary.cells})
    screen.print(f"{sweep.name}: {sweep.about}" if sweep.about else sweep.name, markup=False)
    screen.print(f"{cells} {'cell' if cells == 1 else 'cells'}: {states}")
    screen.print(f"target: {'; '.join(sorted(targets))}", markup=False)
    screen.print(f"batch, global (local): {', '.join(f'{whole} ({local})' for whole, local in batches)}")
    screen.print(f"ranks: {summary.total_ranks} in all cells, {summary.largest_world} in the largest")


def _power_in_words(planned: PlannedComparisons) -> str:
    """What the study can decide, and the repeats that would do."""
    from analysis.statistics.power import decidable, detectable_ratio, repeats_for  # noqa: PLC0415  loads scipy

    count, runs = planned.count, planned.runs
    if not count:
        return "comparisons: none, no arm shares its setting and world size with a first-order arm"
    start = f"comparisons: {count} with a first-order arm, n = {runs}"
    needed = repeats_for(count)
    if decidable(runs) < count:
        return f"{start}: cannot decide {'it' if count == 1 else 'them'} at 5 %; {needed} repeats can"
    ratio = None if planned.scatter is None else detectable_ratio(planned.scatter, runs, count)
    if ratio is None:
        return f"{start}: can decide {'it' if count == 1 else 'them'} at 5 %"
    return (
        f"{start}: finds a speed-up of {ratio:.2f} or more in 3 of 4 cases, at the scatter of the runs so "
        f"far ({planned.scatter:.1%})"
    )


def _tuning_in_words(content: SweepContent, tuning: TuningContent, file: Path) -> str:
    """The trials, and what comes after them."""
    seeds = ", ".join(map(str, content.all_seeds))
    return (
        f"tuning: {tuning.trials} trials of each of {len(content.methods)} methods, seeds {seeds}; then "
        f"kronscale choose -f {file} writes {tuning.study.sweep}"
    )


def _target_in_words(cell: Cell) -> str:
    return f"{cell.target.metric} {cell.target.sign} {cell.target.value:g} on {cell.workload.name}"


def _print_grid(screen: Console, summary: PlanSummary) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("cells by world size", overflow="fold")
    for size in summary.world_sizes:
        table.add_column(str(size), justify="right")
    for method, row in summary.grid().items():
        table.add_row(method, *(str(row.get(size, "-")) for size in summary.world_sizes))
    screen.print()
    screen.print(table)
    screen.print()
    for method, placement in summary.placements().items():
        screen.print(f"{method}: {placement}", markup=False)
    screen.print()


def _print_cells(screen: Console, summary: PlanSummary, differs: dict[str, str], every: bool) -> None:
    shown = summary.cells if every else summary.cells[:_FIRST_CELLS]
    rows = [(summary.states[cell.id], f"{cell.id}  {differs[cell.id]}".rstrip()) for cell in shown]
    print_by_state(screen, rows)
    if len(shown) < len(summary.cells):
        print_line(screen, f"... and {len(summary.cells) - len(shown)} more; --all lists them")


def _site(name: str | None, sweep: str, runs: Path) -> Site:
    return chosen_site(name, sweep_folder(sweep, runs))


def _site_in_words(site: Site, summary: PlanSummary) -> str:
    """Which cells the site cannot run, and what the new ones could cost there."""
    launcher = LAUNCHERS[site.launcher]
    errors: list[str] = []
    failing, oversubscribed = 0, 0
    by_size: dict[int, list[Cell]] = {}
    for cell in summary.cells:
        by_size.setdefault(cell.world_size, []).append(cell)
    fitting: list[Cell] = []
    for cells in by_size.values():  # whether a cell fits depends on its world size alone
        try:
            launcher.check(cells[0], site)
            oversubscribed += launcher.plan(cells[0], site).oversubscribed * len(cells)
            fitting += cells
        except SiteError as error:
            errors.append(str(error))
            failing += len(cells)
    crowded = f"{oversubscribed} cells have more ranks than CPUs: their epochs count, their seconds do not"
    parts = [crowded] if oversubscribed else []
    if errors:
        first = "the first: " if failing > 1 else ""
        parts.append(f"{failing} of {len(summary.cells)} cells cannot run, {first}{errors[0]}")
    words = f"site {site.name}: {'; '.join(parts) or 'every cell fits'}"
    if slow := bfloat16_note(summary.cells, site):
        words += f"\n{slow}"
    new = [cell for cell in fitting if summary.states[cell.id] == "new"]
    if not new:
        return words
    cost = launcher.estimate_cost(new, site)
    return f"{words}\ncost of new cells: {cost_in_words(cost, expected_cost(new, summary.taken, site))}"
