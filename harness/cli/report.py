"""`kronscale report`: writes figures, tables and an HTML page from records."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli.cell_selection import selected_cells, stored_sweep
from harness.cli.options import RUNS, FileInstead, Overrides, Runs, SweepName, Where
from harness.cli.output import console, print_left_out, print_note, text_table, with_progress
from harness.cli.scoring_rules import OtherTarget, Rule, read_rule, scored
from harness.errors import UserError
from harness.runs.commands import command
from harness.runs.store import SweepFolder
from harness.study.sweep import read_sweep
from harness.yaml_files.validation_messages import not_allowed

if TYPE_CHECKING:
    import pandas as pd

    from analysis.records.study import Study

SHOWN = ["arm", "world_size", "runs", "left_out", "reached", "median_seconds", "epochs", "speedup", "verdict"]
"""Columns of the summary that fit a terminal; the report has all columns."""


def report(
    sweep: SweepName = None,
    file: FileInstead = None,
    runs: Runs = RUNS,
    where: Where = None,
    set_: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of the report. Default: report/ in the sweep's."),
    ] = None,
    archives: Annotated[
        list[Path] | None,
        typer.Option(
            "--archive",
            metavar="FILE",
            dir_okay=False,
            help="Report this archive, with --out; may be repeated.",
        ),
    ] = None,
    rule: Rule = "first",
    at: OtherTarget = None,
    figures: Annotated[
        list[str] | None,
        typer.Option(
            "--figure", metavar="NAME", help="Draw only this figure: scaling. May be repeated. Default: all."
        ),
    ] = None,
) -> None:
    """Write report.html with figures and tables from stored runs, and print the summary.

    The name of a sweep means all of its stored cells, its file the cells of the file, as for `status`.
    """
    folder = None if archives and not (sweep or file) else _folder(sweep, file, set_, runs)
    wanted = _wanted(sweep, file, set_, where, runs)
    target = _report_folder(folder, archives, out, rule if at is None else f"{rule}-at-{at:g}")
    # imported after the arguments are checked: pandas and matplotlib are slow to load
    from analysis.records.left_out_notes import left_out_note, quietly  # noqa: PLC0415
    from analysis.records.loading import load  # noqa: PLC0415
    from analysis.report.answers import PREDICT, headline, recommendation, unmeasured  # noqa: PLC0415
    from analysis.report.findings import findings, resumed_note  # noqa: PLC0415
    from analysis.report.page import Panel, write_report  # noqa: PLC0415
    from analysis.report.tables import summary_table  # noqa: PLC0415
    from analysis.results import results  # noqa: PLC0415

    scoring = read_rule(rule)
    names = _figures(figures)
    if folder is not None and (file or not where):  # with --where they have been printed
        print_left_out(SweepFolder(folder).unreadable())
    with quietly():
        study = scored(load(archives or folder or ""), scoring, at)
    study, selection = (study, "") if wanted is None else _selected(study, wanted, runs)
    print_note(left_out_note(study.cells))
    screen = console()
    hint = PREDICT if folder is None else command("predict --from", folder, "--world-size", "N")
    page = write_report(
        study,
        target,
        with_progress([Panel(name) for name in names], "drawing", screen),
        commands={} if folder is None else {folder.name: command("run", folder)},
        notes=[selection] if selection else [],
        recommend=hint,
    )
    summary = summary_table(study)
    columns = [name for name in SHOWN if name in summary]
    table = text_table((name.replace("_", " ") for name in columns), summary[columns].itertuples(index=False))
    screen.print(table if len(summary) else findings(study)[0], markup=False)
    if len(summary):
        shown = results(study)
        said = [headline(shown.places), *recommendation(shown), unmeasured(shown.places, hint)]
        for line in filter(None, said):
            screen.print(line, markup=False, soft_wrap=True)
    for note in filter(None, [selection, *_notes(summary), resumed_note(study.cells)]):
        screen.print(note, style="dim", markup=False, highlight=False)
    screen.print(f"report: {page}", soft_wrap=True, markup=False, highlight=False)


def _figures(wanted: list[str] | None) -> list[str]:
    """The figures to draw, in the order of the report; all of them unless some are wanted."""
    from analysis.figures import FIGURES  # noqa: PLC0415  loads matplotlib

    for name in wanted or ():
        if name not in FIGURES:
            raise UserError(f"--figure={name!r} is not a figure{not_allowed(name, FIGURES)}")
    return [name for name in FIGURES if not wanted or name in wanted]


def _report_folder(folder: Path | None, archives: list[Path] | None, out: Path | None, rule: str) -> Path:
    if archives and (folder is not None or out is None):
        raise UserError("--archive takes the place of a sweep and needs --out, the folder of the report")
    return out or (folder or Path()) / ("report" if rule == "first" else f"report-{rule}")


def _folder(sweep: str | None, file: Path | None, overrides: list[str] | None, runs: Path) -> Path:
    if (sweep is None) == (file is None):
        raise UserError("report needs either the name of a sweep or its file: kronscale report demo")
    if file is not None:
        sweep = read_sweep(file, overrides or ()).name
    return stored_sweep((sweep or "").partition("/")[0] if file is None else sweep or "", runs).path


def _wanted(
    sweep: str | None, file: Path | None, overrides: list[str] | None, where: list[str] | None, runs: Path
) -> set[str] | None:
    """Ids of the cells that `status` would show for the same words; None for all stored ones of a sweep."""
    if not (file or overrides or where or "/" in (sweep or "")):
        return None
    if sweep is None and file is None:
        raise UserError("--where and --set select cells of a sweep; --archive takes all of its cells")

    return {cell.id for cell in selected_cells(sweep, file, overrides or (), where or (), runs)}


def _selected(study: Study, wanted: set[str], runs: Path) -> tuple[Study, str]:
    """The wanted cells, and a sentence unless these are all that are stored.

    Raises:
        UserError: others are stored, but none of the wanted.
    """
    stored = set(study.cells["cell"])
    if stored and not wanted & stored:
        raise UserError(
            f"none of the {len(wanted)} selected cells is stored in {runs}, only {len(stored)} others of the "
            f"sweep, such as {min(stored)}; its name instead of its file reports all that are stored"
        )
    parts = []
    if others := len(stored - wanted):
        parts.append(f"{others} stored {'cell was' if others == 1 else 'cells were'} not selected")
    if missing := len(wanted - stored):
        verb = "is" if missing == 1 else "are"
        parts.append(f"{missing} of {len(wanted)} selected cells {verb} not stored")
    selection = f"Selected cells only: {', '.join(parts)}." if parts else ""
    return study.of_cells(wanted) if others else study, selection


def _notes(summary: pd.DataFrame) -> list[str]:
    """Notes on the table, once each instead of in every row."""
    notes = [f"speedup: {method}" for method in summary["method"].unique() if method]
    if summary["world_size"].str.endswith("*").any():
        notes.append("*: more ranks than CPUs, so their times say nothing about scaling")
    return notes
