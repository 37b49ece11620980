"""`kronscale reproduce`: submits a paper's sweeps, and writes its figures and tables once they have ended."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli import completion
from harness.cli.error_messages import INTERRUPTED
from harness.cli.options import RUNS, Budget, DryRun, LastSite, Runs, Where, Yes
from harness.cli.output import console, with_progress
from harness.cli.paper_sweeps import (
    agreed_costs,
    in_flight,
    paper_sweeps,
    print_states,
    same_command,
    submit_all,
)
from harness.cli.sweep_statuses import statuses_of
from harness.errors import UserError
from harness.runs.commands import command
from harness.study.papers import PaperError, read_paper
from harness.study.progress import follow
from harness.study.status import LauncherReports
from harness.yaml_files.validation_messages import not_allowed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.cli.paper_sweeps import PaperSweep
    from harness.study.papers import Paper


def reproduce(
    paper: Annotated[
        str,
        typer.Argument(
            help="Paper: sc20, tpds22, dp_kfac or nlcg.",
            show_default=False,
            autocompletion=completion.papers,
        ),
    ],
    size: Annotated[
        str,
        typer.Option(metavar="NAME", help="Size of the reproduction.", autocompletion=completion.paper_sizes),
    ] = "small",
    site: LastSite = None,
    runs: Runs = RUNS,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Folder of the report. Default: papers/<paper>-<size> beside the runs."
        ),
    ] = None,
    report_only: Annotated[
        bool,
        typer.Option(
            "--report-only", help="Submit nothing; report stored runs, or archives of them in --runs."
        ),
    ] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show progress until all cells have ended, then report.")
    ] = False,
    where: Where = None,
    budget: Budget = None,
    dry_run: DryRun = False,
    yes: Yes = False,
) -> None:
    """Submit what is missing of a paper's sweeps; once all have ended, write its figures and tables.

    It does not wait: repeat the command to see how far the runs are, to submit what is missing, and to get
    the report.
    """
    described, files = read_paper(paper, size)
    _check_figures(described)
    sweeps = paper_sweeps(files, runs, where or ())
    missing = [str(one.folder.path) for one in sweeps if one.cells and one.stored is None]
    if report_only and missing:
        raise UserError(f"no runs yet at {', '.join(missing)}: leave --report-only out to run them")
    if dry_run or not report_only:
        costs = agreed_costs(sweeps, site, runs, budget, yes=yes, ask=not dry_run)
        if dry_run:
            return
        submit_all(sweeps, site, runs, budget, costs)
    folder = out or runs.parent / "papers" / f"{paper}-{size}"
    if report_only:
        typer.echo(f"report: {_report(described, sweeps, site, folder, where or ())}")
        return
    again = same_command(paper, size, site, runs, where or (), out)
    _finish(described, sweeps, site, runs, folder, where or (), again, watch=watch)


def _finish(
    paper: Paper,
    sweeps: Sequence[PaperSweep],
    site: str | None,
    runs: Path,
    out: Path,
    where: Sequence[str],
    again: str,
    *,
    watch: bool,
) -> None:
    """Show the states of all cells; write the report if all have ended."""
    if watch:
        cells, reports = [sweep.cells for sweep in sweeps if sweep.cells], LauncherReports()
        try:
            follow(lambda: list(chain.from_iterable(statuses_of(cells, runs, reports=reports))), console())
        except KeyboardInterrupt:
            typer.echo(f"detached: the runs continue; to see or finish them: {again}")
            raise typer.Exit(INTERRUPTED) from None
    statuses = [sweep.statuses() for sweep in sweeps]
    print_states(sweeps, statuses)
    if any(map(in_flight, statuses)):
        typer.echo(f"the runs continue by themselves; to see or finish them: {again}")
        return
    typer.echo(f"report: {_report(paper, sweeps, site, out, where)}")
    failed = [
        sweep.folder.path
        for sweep, found in zip(sweeps, statuses, strict=True)
        if any(one.state != "COMPLETED" for one in found)
    ]
    if failed:
        typer.echo("some cells did not complete, as the report lists")
        for path in failed:
            typer.echo(f"to start those of {path.name} again: {command('retry', path, site=site or 'local')}")
        raise typer.Exit(1)


def _check_figures(paper: Paper) -> None:
    """Check that all figures exist, before hours of runs."""
    from analysis.figures import FIGURES  # noqa: PLC0415  loads matplotlib

    for figure in paper.figures:
        if figure.figure not in FIGURES:
            raise PaperError(
                f"{paper.paper}: figure={figure.figure!r} is unknown{not_allowed(figure.figure, FIGURES)}"
            )


def _report(
    paper: Paper, sweeps: Sequence[PaperSweep], site: str | None, out: Path, where: Sequence[str]
) -> Path:
    """Write the report of what is stored; figures of sweeps without runs are left out."""
    from analysis.records.loading import load  # noqa: PLC0415
    from analysis.report.page import Panel, write_report  # noqa: PLC0415

    stored = {one.key: one.stored for one in sweeps}
    studies = {key: load(path) for key, path in stored.items() if path is not None}
    summary = paper.summary if paper.summary in studies else next(iter(studies))
    panels = [
        Panel(figure.figure, figure.shows, studies[figure.sweep], f"{place:02}-{figure.figure}")
        for place, figure in enumerate(paper.figures, start=1)
        if figure.sweep in studies
    ]
    words = " ".join(f"--where {expression!r}" for expression in where)
    return write_report(
        studies[summary],
        out,
        with_progress(panels, "drawing", console()),
        commands={
            one.folder.path.name: command("run", one.folder.path, site=site or "local")
            for one in sweeps
            if one.key in studies
        },
        title=f"{paper.title}, reproduced in {paper.about}",
        also=[study for key, study in studies.items() if key != summary],
        notes=[f"Only a part of the paper's runs was asked for: {words}"] if where else [],
    )
