"""`kronscale choose`: writes a study's sweep from the trials of the sweep that tuned its methods."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli.options import RUNS, Runs, SweepFile
from harness.cli.output import console, text_table
from harness.cli.scoring_rules import OtherTarget, Rule, read_rule, scored
from harness.errors import SweepError, UserError
from harness.runs.commands import command
from harness.runs.store import sweep_folder
from harness.study.choose import study_text
from harness.study.sweep import read_sweep
from harness.yaml_files.validation_messages import not_allowed

if TYPE_CHECKING:
    import pandas as pd

    from harness.study.sweep import Sweep

SHOWN = ["method", "trials", "reached", "best_seconds", "median_seconds", "regret", "spent_seconds"]


def choose(
    file: SweepFile,
    runs: Runs = RUNS,
    archives: Annotated[
        list[Path] | None,
        typer.Option(
            "--archive",
            metavar="FILE",
            dir_okay=False,
            help="Take the trials from this archive; may be repeated.",
        ),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="Only these methods, such as sgd,comm_opt. Default: all."),
    ] = None,
    rule: Rule = "first",
    at: OtherTarget = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The study's sweep. Default: <its name>.yaml beside the file."),
    ] = None,
) -> None:
    """Write the study's sweep: each method with the setting of its best trial, and fresh seeds.

    The best trial is the one with the smallest median time to the target; misses come last. All trials are
    kept in <study>.trials.csv beside the sweep. Nothing is written while a trial is missing.
    """
    sweep = read_sweep(file)
    if sweep.content.tuning is None:
        raise SweepError(f"{file}: has no `tuning`, so there is nothing to choose from")
    chosen = list(sweep.trials) if methods is None else methods.split(",")
    for name in chosen:
        if name not in sweep.trials:
            raise UserError(f"--methods: {name!r} is not a method{not_allowed(name, sweep.trials)}")
    study = sweep.content.tuning.study.sweep
    target = out or file.with_name(f"{study}.yaml")
    _refuse_after_the_study(study, runs, target)
    trials, summary, slowed = _tables(sweep, runs, archives or [], chosen, rule, at)
    first = trials[trials["place"] == 1]
    best = {str(method): int(trial) for method, trial in zip(first["method"], first["trial"], strict=True)}
    text = study_text(sweep, best, at)
    table = target.with_name(f"{target.stem}.trials.csv")
    _write_checked(target, text)
    table.write_text(trials.to_csv(index=False, lineterminator="\n"), encoding="utf-8")
    _print(summary, best)
    for name in summary.loc[summary["reached"] == 0, "method"]:
        typer.echo(f"no trial of {name} reached the target; the one with the best value was taken", err=True)
    for sentence in slowed:
        typer.echo(f"warning: {sentence}", err=True)
    if slowed:
        typer.echo(
            f"to decide it, remove {target} and {table}, repeat the disturbed trials with kronscale retry "
            f"{sweep.name} --disturbed, and choose again",
            err=True,
        )
    typer.echo(f"study: {target}\ntrials: {table}")


def _tables(
    sweep: Sweep, runs: Path, archives: list[Path], chosen: list[str], rule: str, at: float | None
) -> tuple[pd.DataFrame, pd.DataFrame, list[str]]:
    """All trials of the chosen methods, a row for each method, and which trials the load may have cost.

    Raises:
        UserError: a trial has not completed, or was made from another search space.
    """
    from analysis.records.left_out_notes import quietly  # noqa: PLC0415  pandas is slow to load
    from analysis.records.loading import load  # noqa: PLC0415
    from analysis.tuning import by_method, slowed_trials, slowed_words, trials  # noqa: PLC0415

    scoring = read_rule(rule)
    folder = sweep_folder(sweep.name, runs).path
    with quietly():
        study = scored(load([*archives] or folder), scoring, at)
    wanted = {cell.id: cell for cell in sweep.cells if cell.method in chosen}
    study = study.only(study.cells["cell"].isin(list(wanted)) & (study.cells["sweep"] == sweep.name))
    stored = dict(
        zip(study.cells["cell"], study.cells["state"].where(study.cells["valid"], "damaged"), strict=True)
    )
    open_cells = {cell: stored.get(cell, "not there") for cell in wanted if stored.get(cell) != "COMPLETED"}
    if open_cells:
        first, state = next(iter(open_cells.items()))
        raise UserError(
            f"{len(open_cells)} of {len(wanted)} runs of trials have not completed, such as "
            f"{first} ({state}): "
            f"every method needs all of its trials; {command('status', folder)}"
        )
    return trials(study), by_method(study), slowed_words(slowed_trials(study))


def _refuse_after_the_study(study: str, runs: Path, target: Path) -> None:
    """Nothing may be chosen once runs of the study have been seen."""
    folder = sweep_folder(study, runs)
    if folder.holds_cells():
        raise UserError(
            f"{folder.path} has runs of the study already; settings are chosen before the first of them"
        )
    if target.exists():
        raise UserError(f"{target} exists; remove it to choose again")


def _write_checked(target: Path, text: str) -> None:
    """Write the sweep, and read it as `plan` would; one that cannot be read is not kept."""
    target.write_text(text, encoding="utf-8")
    try:
        read_sweep(target)
    except UserError:
        target.unlink()
        raise


def _print(summary: pd.DataFrame, best: dict[str, int]) -> None:
    from analysis.report.tables import tuning_table  # noqa: PLC0415

    shown = tuning_table(summary)
    shown.insert(1, "trial", [str(best[method]) for method in shown["method"]])
    console().print(
        text_table((name.replace("_", " ") for name in shown.columns), shown.itertuples(index=False)),
        markup=False,
    )
