"""The sweeps of a paper as `reproduce` uses them: cells, cost, submission, states."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import typer

from harness.cell import Cell
from harness.cli.cost_consent import cost_in_words, with_consent
from harness.cli.submissions import count, print_submission, site_for, start
from harness.launchers.cost import CostEstimate
from harness.launchers.site_profile import Site
from harness.runs.archive import SUFFIX
from harness.runs.commands import runs_option
from harness.runs.store import SweepFolder, sweep_folder
from harness.study.cell_states import IN_FLIGHT
from harness.study.filters import select
from harness.study.progress import state_counts
from harness.study.status import CellStatus, read_statuses
from harness.study.submit import preview_cost
from harness.study.sweep import read_sweep


@dataclass(frozen=True)
class PaperSweep:
    """One of a paper's sweeps.

    Attributes:
        key: its name in the paper's list of figures.
        cells: those that are selected, maybe none.
        folder: of its runs.
    """

    key: str
    file: Path
    cells: Sequence[Cell]
    folder: SweepFolder

    @property
    def stored(self) -> Path | None:
        """The folder of its runs, or in its place their archive; None if there is neither."""
        archive = self.folder.path.with_name(f"{self.folder.path.name}{SUFFIX}")
        return next((path for path in (self.folder.path, archive) if path.exists()), None)

    def statuses(self) -> list[CellStatus]:
        """The states of its cells."""
        return read_statuses(self.folder, self.cells) if self.cells else []


@dataclass(frozen=True)
class Costs:
    """What the new cells of sweeps cost: at most of each sweep, and of all what completed runs let expect."""

    of_each: Sequence[CostEstimate]
    expected: CostEstimate | None

    @property
    def total(self) -> CostEstimate:
        """The most that all of them could cost."""
        return sum(self.of_each, start=CostEstimate())


def paper_sweeps(files: dict[str, Path], runs: Path, where: Sequence[str]) -> list[PaperSweep]:
    """Read the sweeps, with the cells that match; a filter may match cells of some of them only.

    Raises:
        UserError: a sweep cannot be read, or no cell of any of them matches.
    """
    sweeps = {key: read_sweep(file) for key, file in files.items()}
    cells = [cell for sweep in sweeps.values() for cell in sweep.cells]
    chosen = set(map(id, select(cells, *where)))
    return [
        PaperSweep(
            key,
            files[key],
            [cell for cell in sweep.cells if id(cell) in chosen],
            sweep_folder(sweep.name, runs),
        )
        for key, sweep in sweeps.items()
    ]


def agreed_costs(
    sweeps: Sequence[PaperSweep], site: str | None, runs: Path, budget: float | None, *, yes: bool, ask: bool
) -> Costs:
    """Print what each sweep and all together could cost; with `ask`, ask where that is much.

    Raises:
        BudgetError: it could cost more than the budget, or so much that somebody has to agree.
    """
    of_each, known = [], []
    for sweep in sweeps:
        cost, likely = CostEstimate(), None
        if sweep.cells:
            profile = site_for(sweep.cells, site, runs, None)
            new, cost, likely = preview_cost(sweep.cells, profile, runs)
            if new:
                words = f"{count(new)} to site {profile.name}: {cost_in_words(cost, likely)}"
                typer.echo(f"{sweep.file}: {words}")
        of_each.append(cost)
        known += [likely] if likely is not None else []
    costs = Costs(of_each, sum(known, start=CostEstimate()) if known else None)
    if costs.total.jobs:
        typer.echo(f"all sweeps: {cost_in_words(costs.total, costs.expected)}")

    def refuse(budget: float | None, refuse_much: bool) -> None:
        costs.total.refuse_beyond(budget)
        if ask and refuse_much and budget is None:
            costs.total.refuse_unasked()

    with_consent(refuse, budget, yes=yes)
    return costs


def submit_all(
    sweeps: Sequence[PaperSweep], site: str | None, runs: Path, budget: float | None, costs: Costs
) -> None:
    """Submit the cells of all sweeps that have no attempt; each sweep gets its share of the budget.

    Raises:
        UserError: as `harness.study.submit.submit`; the sweeps before it are submitted.
    """
    total = costs.total.counted
    for sweep, cost in zip(sweeps, costs.of_each, strict=True):
        if not sweep.cells:
            continue
        profile: Site = site_for(sweep.cells, site, runs, None)
        share = budget * cost.counted / total if budget is not None and total else budget
        typer.echo(f"{sweep.file}: ", nl=False)
        print_submission(start(sweep.cells, profile, runs, share, yes=True), profile, site, runs)


def print_states(sweeps: Sequence[PaperSweep], statuses: Sequence[Sequence[CellStatus]]) -> None:
    """A line for each sweep with cells, `demo: 3 COMPLETED, 1 PENDING`, and what a cell waits for."""
    for sweep, found in zip(sweeps, statuses, strict=True):
        if not found:
            continue
        waiting = next((one.cause for one in found if one.state == "PENDING" and one.cause), "")
        typer.echo(f"{sweep.folder.path.name}: {state_counts(found)}{f'; {waiting}' if waiting else ''}")


def in_flight(statuses: Sequence[CellStatus]) -> bool:
    """Whether any cell is pending or running."""
    return any(one.state in IN_FLIGHT for one in statuses)


def same_command(
    paper: str, size: str, site: str | None, runs: Path, where: Sequence[str], out: Path | None
) -> str:
    """The command that shows how far the reproduction is, and finishes it."""
    words = ["kronscale", "reproduce", paper, "--size", size]
    for name, value in (*(("--where", one) for one in where), ("--site", site), ("--out", out)):
        words += [name, str(value)] if value is not None else []
    return shlex.join([*words, *runs_option(runs)])
