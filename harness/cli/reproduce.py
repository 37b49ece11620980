"""`kronscale reproduce`: runs a paper's sweeps, then writes its figures and tables in one report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli import completion
from harness.cli.options import RUNS, Budget, DryRun, HoursBy, LastSite, Runs, Yes
from harness.errors import UserError

if TYPE_CHECKING:
    from harness.study.papers import Paper

HEADLINE = "headline"
HEADLINE_FOLDER = Path("results/headline")
"""Of its archives, and of what is drawn from them."""


def reproduce(
    paper: Annotated[
        str,
        typer.Argument(
            help="Paper: sc20, tpds22, dp_kfac or nlcg; or headline, the study of results/headline.",
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
        bool, typer.Option("--report-only", help="Run nothing; report stored runs.")
    ] = False,
    budget: Budget = None,
    calibration: HoursBy = None,
    dry_run: DryRun = False,
    yes: Yes = False,
) -> None:
    """Run what is missing of a paper's sweeps, and write its figures and tables from these runs.

    `headline` runs nothing: it draws the study of K-FAC against tuned first-order methods from its archives.
    """
    if paper == HEADLINE:
        typer.echo(f"page: {_headline(out or HEADLINE_FOLDER)}")
        return
    from harness.runs.commands import command  # noqa: PLC0415  loads pydantic
    from harness.runs.store import sweep_folder  # noqa: PLC0415
    from harness.study.papers import read_paper  # noqa: PLC0415
    from harness.study.sweep import read_sweep  # noqa: PLC0415

    described, files = read_paper(paper, size)
    _check_figures(described)
    folders = {key: sweep_folder(read_sweep(file).name, runs).path for key, file in files.items()}
    missing = [str(folder) for folder in folders.values() if not folder.is_dir()]
    if report_only and missing:
        raise UserError(f"no runs yet at {', '.join(missing)}: leave --report-only out to run them")
    if dry_run or not report_only:
        if calibration is not None:
            _print_hours(files, runs, calibration)
        _check_cost(files, site, runs, budget, yes=yes, dry_run=dry_run)
    if dry_run:
        return
    codes = []
    for number, file in enumerate(() if report_only else files.values(), start=1):
        typer.echo(f"sweep {number} of {len(files)}: {file}")
        codes.append(_run(file, site, runs))
    commands = {folder.name: command("run", folder, site=site or "local") for folder in folders.values()}
    page = _report(described, folders, commands, out or runs.parent / "papers" / f"{paper}-{size}")
    typer.echo(f"report: {page}")
    if any(codes):
        typer.echo("some cells did not complete, as the report lists")
        for folder, code in zip(folders.values(), codes, strict=True):
            if code:
                typer.echo(
                    f"to start those of {folder.name} again: {command('retry', folder, site=site or 'local')}"
                )
        raise typer.Exit(1)


def _headline(out: Path) -> Path:
    """Draw the headline study from the archives in its folder; says so if there are none."""
    from analysis.headline.page import write_headline  # noqa: PLC0415  pandas and matplotlib are slow to load
    from analysis.records.tables import load  # noqa: PLC0415
    from harness.runs.archive import SUFFIX  # noqa: PLC0415

    archives = sorted(HEADLINE_FOLDER.glob(f"*{SUFFIX}"))
    if not archives:
        typer.echo(f"no archive in {HEADLINE_FOLDER}: the study has not been run")
    return write_headline(load(archives) if archives else None, out, [path.name for path in archives])


def _check_figures(paper: Paper) -> None:
    """Check that all figures exist, before hours of runs."""
    from analysis.figures import FIGURES  # noqa: PLC0415  # see reproduce
    from harness.study.papers import PaperError  # noqa: PLC0415
    from harness.yaml_files.validation_messages import not_allowed  # noqa: PLC0415

    for figure in paper.figures:
        if figure.figure not in FIGURES:
            raise PaperError(
                f"{paper.paper}: figure={figure.figure!r} is unknown{not_allowed(figure.figure, FIGURES)}"
            )


def _print_hours(files: dict[str, Path], runs: Path, calibration: str) -> None:
    """Print the predicted hours of the cells that are new, by sweep and of all together."""
    from analysis.cost_model.hours import PredictedHours  # noqa: PLC0415  # see reproduce
    from harness.cli.predicted_hours import hours_of, machine_named  # noqa: PLC0415
    from harness.study.plan_summary import plan_summary  # noqa: PLC0415
    from harness.study.sweep import read_sweep  # noqa: PLC0415

    machine, total = machine_named(calibration), PredictedHours()
    for file in files.values():
        summary = plan_summary(read_sweep(file).cells, runs)
        hours = hours_of(summary.new, machine)
        typer.echo(f"{file}: predicted: {hours}")
        total += hours
    typer.echo(f"all sweeps: predicted: {total}")
    typer.echo(f"calibration {machine.name}: {machine.source}")


def _check_cost(
    files: dict[str, Path], site: str | None, runs: Path, budget: float | None, *, yes: bool, dry_run: bool
) -> None:
    """Print what every sweep and all together could cost, and ask where that is much.

    Raises:
        BudgetError: it could cost more than the budget, or so much that somebody has to agree.
    """
    from harness.cli.cost_consent import cost_in_words, with_consent  # noqa: PLC0415  # see reproduce
    from harness.cli.submissions import count, site_for  # noqa: PLC0415
    from harness.launchers.cost_estimate import CostEstimate  # noqa: PLC0415
    from harness.study.submit import preview_cost  # noqa: PLC0415
    from harness.study.sweep import read_sweep  # noqa: PLC0415

    total, expected = CostEstimate(), CostEstimate()
    known = False
    for file in files.values():
        cells = read_sweep(file).cells
        profile = site_for(cells, site, runs, None)
        new, cost, likely = preview_cost(cells, profile, runs)
        total, expected, known = (
            total + cost,
            expected + (likely or CostEstimate()),
            known or likely is not None,
        )
        if new:
            typer.echo(f"{file}: {count(new)} to site {profile.name}: {cost_in_words(cost, likely)}")
    if total.jobs:
        typer.echo(f"all sweeps: {cost_in_words(total, expected if known else None)}")

    def refuse(budget: float | None, ask: bool) -> None:
        total.refuse_beyond(budget)
        if ask and budget is None and not dry_run:
            total.refuse_unasked()

    with_consent(refuse, budget, yes=yes)


def _run(file: Path, site: str | None, runs: Path) -> int:
    from harness.cli.operate import run  # noqa: PLC0415  # see reproduce

    try:
        run(None, file, site, runs, yes=True)  # all sweeps together were asked about
    except typer.Exit as ended:
        if ended.exit_code > 1:  # interrupted: the runs continue, and there is nothing to report yet
            raise
        return ended.exit_code
    return 0


def _report(paper: Paper, folders: dict[str, Path], commands: dict[str, str], out: Path) -> Path:
    from analysis.records.tables import load  # noqa: PLC0415
    from analysis.report.page import Panel, write_report  # noqa: PLC0415  # see reproduce
    from harness.cli.output import console, with_progress  # noqa: PLC0415

    studies = {key: load(folder) for key, folder in folders.items()}
    panels = [
        Panel(figure.figure, figure.shows, studies[figure.sweep], f"{place:02}-{figure.figure}")
        for place, figure in enumerate(paper.figures, start=1)
    ]
    return write_report(
        studies[paper.summary],
        out,
        with_progress(panels, "drawing", console()),
        commands=commands,
        title=f"{paper.title}, reproduced in {paper.about}",
        also=[study for key, study in studies.items() if key != paper.summary],
    )
