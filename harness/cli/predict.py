"""`kronscale predict`: costs at world sizes that were not measured."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.cli.options import RUNS, AsJson, Runs
from harness.cli.prediction_options import (
    CALIBRATION_HELP,
    FROM_HELP,
    MODEL_HELP,
    MOST_EXAMPLES,
    MOST_RANKS,
    SET_HELP,
    SIZES_HELP,
    memory_bytes,
    whole_number,
)
from harness.errors import UserError

if TYPE_CHECKING:
    from analysis.cost_model.arms import Question, Recommendation, Table

_SIZES = "1,2,4,8,16,32,64,128,256,512,1024,2048,4096"
_GIB = 2**30
_BATCH = 32
_CALIBRATION = "spd_kfac_64"
_FRACTION = 0.5  # of hybrid_opt; at each world size the nearest that divides it


def predict(
    model: Annotated[str | None, typer.Option(metavar="NAME", help=MODEL_HELP)] = None,
    sweep: Annotated[str | None, typer.Option("--from", metavar="SWEEP", help=FROM_HELP)] = None,
    calibration: Annotated[str | None, typer.Option(metavar="NAME", help=CALIBRATION_HELP)] = None,
    world_size: Annotated[str | None, typer.Option(metavar="LIST", help=SIZES_HELP)] = None,
    local_batch_size: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, max=MOST_EXAMPLES, help="Examples per rank. Default: 32."),
    ] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help=SET_HELP)] = None,
    overlap: Annotated[bool, typer.Option(help="Overlap communication with computation.")] = False,
    memory_gib: Annotated[
        float | None,
        typer.Option(metavar="GIB", min=0, help="Memory per rank. Default: that of the calibrated device."),
    ] = None,
    epochs_ratio: Annotated[
        float | None, typer.Option(metavar="R", min=0, help="Ratio of K-FAC's to SGD's epochs to the target.")
    ] = None,
    recommend: Annotated[bool, typer.Option(help="Recommend strategy, fraction and intervals.")] = False,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder to draw the figure in.")] = None,
    runs: Runs = RUNS,
    as_json: AsJson = False,
) -> int:
    """Predict step time and memory of SGD and every strategy, or with --from the arms of your own study.

    With --from, a sweep's measured small worlds give the times, its exchanges the links, and its spread and
    its held-out worlds the bounds. Exit code 1 if no strategy fits into memory for --recommend.
    """
    if (model is None) == (sweep is None):
        raise UserError("predict needs either --model NAME, or --from SWEEP, a study with small worlds")
    if sweep is not None:
        given: dict[str, object] = {
            "--local-batch-size": local_batch_size, "--set": set_, "--overlap": overlap or None,
            "--memory-gib": memory_gib, "--epochs-ratio": epochs_ratio, "--recommend": recommend or None,
            "--out": out,
        }  # fmt: skip
        _refuse(given)
        from harness.cli.recommend import predict_study  # noqa: PLC0415  not needed with --model

        predict_study(sweep, runs, None if world_size is None else _sizes(world_size), calibration, as_json)
        return 0
    return _predict_model(
        model or "", calibration or _CALIBRATION, world_size or _SIZES, local_batch_size or _BATCH, set_,
        overlap, memory_gib, epochs_ratio, recommend, out, as_json,
    )  # fmt: skip


_RECOMMEND = "kronscale recommend SWEEP "
_INSTEAD = {
    "--recommend": f"{_RECOMMEND}recommends",
    "--memory-gib": f"{_RECOMMEND}takes it",
    "--out": f"{_RECOMMEND}draws maps",
    "--epochs-ratio": "the study's runs have their epochs",
}
"""Why an option of `--model` has no effect with `--from`, where that is not for the study's cells."""


def _refuse(given: dict[str, object]) -> None:
    """Refuse options that would have no effect on predictions of a study.

    Raises:
        UserError: one of them is given.
    """
    for option, value in given.items():
        if value is not None:
            instead = _INSTEAD.get(option, "the study's cells set it")
            raise UserError(f"{option} has no effect with --from: {instead}")


def _predict_model(
    model: str,
    calibration: str,
    world_size: str,
    local_batch_size: int,
    set_: list[str] | None,
    overlap: bool,
    memory_gib: float | None,
    epochs_ratio: float | None,
    recommend: bool,
    out: Path | None,
    as_json: bool,
) -> int:
    from analysis.cost_model.arms import Question, ask  # noqa: PLC0415  slow to load
    from analysis.cost_model.arms import recommend as best  # noqa: PLC0415
    from analysis.cost_model.calibration_file import read_calibration  # noqa: PLC0415
    from analysis.cost_model.errors import CostModelError  # noqa: PLC0415
    from harness.cli.prediction_options import configured, model_named, settings  # noqa: PLC0415

    try:
        machine = read_calibration(calibration)
        values = settings(set_ or ())
        given = values.pop("grad_worker_fraction", None)
        fraction, sizes = _fitting_sizes(given, world_size)
        if "solver" not in values:
            values["solver"] = "eigen" if "eigen" in machine.inverse else "inverse"
        budget = machine.memory_bytes if memory_gib is None else memory_bytes(memory_gib)
        if epochs_ratio is not None and not 0 < epochs_ratio < math.inf:
            raise UserError(f"--epochs-ratio={epochs_ratio:g} must be a finite number > 0")
        question = Question(
            model_named(model, machine), configured("comm_opt", 1, values), local_batch_size, machine,
            fraction, overlap, budget, epochs_ratio,
        )  # fmt: skip
        table = ask(question, sizes)
        chosen = None
        if recommend:
            fixed = {"factor_update_steps", "inverse_update_steps"} & values.keys()
            chosen = best(question, sizes[-1], choose_intervals=not fixed)
    except CostModelError as error:
        raise UserError(str(error)) from None
    if as_json:
        content = {
            "model": question.model.name,
            "calibration": machine.name,
            "largest_measured_world_size": machine.largest_world_size,
            "local_batch_size": local_batch_size,
            "arms": _rows(question, table),
            "recommended": _recommended(chosen),
        }
        typer.echo(json.dumps(content, indent=1))
    else:
        _print(question, table)
        if recommend:
            _print_recommendation(chosen, sizes[-1], question)
    if out is not None:
        _draw(question, table, out)
    return 1 if recommend and chosen is None else 0


def _sizes(text: str) -> list[int]:
    sizes = {whole_number(part) for part in text.split(",")}
    if None in sizes or not all(1 <= size <= MOST_RANKS for size in sizes if size is not None):
        raise UserError(
            f"--world-size {text[:100]}: sizes must be whole numbers from 1 to {MOST_RANKS}; write 64,4096"
        )
    return sorted(size for size in sizes if size is not None)


def _fitting_sizes(fraction: Any, text: str) -> tuple[float, list[int]]:
    """The fraction of hybrid_opt, and the world sizes; of the default ones those that it divides."""
    from kfac_core.errors import PlacementError  # noqa: PLC0415  see predict
    from kfac_core.placement.strategies.hybrid_opt import grad_workers  # noqa: PLC0415

    sizes = _sizes(text)
    if fraction is None:
        return _FRACTION, sizes
    if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction <= 1:
        raise UserError(f"--set grad_worker_fraction={fraction!r} must be a number in (0, 1]")
    fitting: list[int] = []
    for size in sizes:
        try:
            grad_workers(size, fraction)
            fitting.append(size)
        except PlacementError as error:
            if text != _SIZES:
                raise UserError(f"--set {error} (--world-size {size})") from None
    if not fitting:
        raise UserError(
            f"--set grad_worker_fraction={fraction:g} gives no whole number of gradient workers that "
            f"divides the world at any of {_SIZES} ranks; use such a fraction, or choose --world-size"
        )
    return float(fraction), fitting


def _measured(question: Question) -> str:
    machine = question.calibration
    return (
        f"calibration {machine.name}: {machine.source}; largest measured world {machine.largest_world_size} "
        "ranks, larger worlds (*) are extrapolated"
    )


def _rows(question: Question, table: Table) -> list[dict[str, Any]]:
    """One row per arm and world size, as in the figure and its CSV."""
    from analysis.cost_model.arms import crossovers  # noqa: PLC0415

    crossing: dict[int, list[str]] = {}
    for _, after, sentence in crossovers(question, table):
        crossing.setdefault(after, []).append(sentence)
    return [
        {
            "arm": arm,
            "world_size": size,
            "seconds": prediction.total.central,
            "low": prediction.total.low,
            "high": prediction.total.high,
            "to_accuracy_over_sgd": _over_sgd(question, arms, arm),
            "peak_bytes": prediction.peak_bytes,
            "fits": question.fits(prediction),
            "extrapolated": prediction.extrapolated,
            "inverse_imbalance": prediction.inverse_imbalance,
            "largest_phase": prediction.largest_phase.value,
            "phase_seconds": {p.value: s.central for p, s in prediction.step_seconds.items()},
            "sent_bytes": {p.value: sent for p, sent in prediction.sent_bytes.items()},
            "crossover": "; ".join(crossing.get(size, ())),
        }
        for size, arms in table.items()
        for arm, prediction in arms.items()
    ]


def _over_sgd(question: Question, arms: Any, arm: str) -> float | None:
    """Time to the target relative to SGD's; None if the ratio of epochs is unknown."""
    if question.epochs_ratio is None:
        return None
    return float(question.to_accuracy(arm, arms[arm]) / question.to_accuracy("sgd", arms["sgd"]))


def _recommended(chosen: Recommendation | None) -> dict[str, Any] | None:
    if chosen is None or chosen.setup.config is None:
        return None
    fields = ("strategy", "grad_worker_fraction", "factor_update_steps", "inverse_update_steps")
    settings = {field: getattr(chosen.setup.config, field) for field in fields}
    return {**settings, "reasons": list(chosen.reasons)}


def _print(question: Question, table: Table) -> None:
    from analysis.cost_model.arms import crossovers  # noqa: PLC0415  see predict
    from harness.cli.output import console, figure_table  # noqa: PLC0415

    screen = console()
    config = question.config
    screen.print(
        f"{question.model.name}, {question.local_batch_size} examples a rank, {config.solver}, "
        f"F = {config.factor_update_steps}, E = {config.inverse_update_steps}",
        markup=False,
    )
    for size in table if len(table) <= 2 else [max(table)]:
        title = f"{size} ranks{_star(question, size)}"
        columns = ("arm", "ms a step", "low", "high", "most of it", "peak GiB", "imbalance", "over sgd")
        grid = figure_table(title, columns, "arm", "most of it")
        for row in _rows(question, {size: table[size]}):
            ratio = row["to_accuracy_over_sgd"]
            grid.add_row(
                row["arm"], *(f"{1e3 * row[name]:.1f}" for name in ("seconds", "low", "high")),
                row["largest_phase"],
                f"{row['peak_bytes'] / _GIB:.2f}{'' if row['fits'] else ' does not fit'}",
                f"{row['inverse_imbalance']:.1f}", "" if ratio is None else f"{ratio:.2f}",
            )  # fmt: skip
        screen.print(grid)
    if len(table) > 2:
        sizes = (f"{size}{_star(question, size)}" for size in table)
        grid = figure_table("ms a step", ("arm", *sizes), "arm")
        for arm in next(iter(table.values())):
            grid.add_row(arm, *(f"{1e3 * table[size][arm].total.central:.0f}" for size in table))
        screen.print(grid)
    for _, _, sentence in crossovers(question, table):
        screen.print(f"crossover: {sentence}", markup=False, soft_wrap=True)
    screen.print(_measured(question), markup=False, soft_wrap=True)


def _star(question: Question, world_size: int) -> str:
    return "*" if world_size > question.calibration.largest_world_size else ""


def _print_recommendation(chosen: Recommendation | None, world_size: int, question: Question) -> None:
    from analysis.cost_model.arms import described  # noqa: PLC0415  see predict

    if chosen is None:
        gib = (question.memory_bytes or 0) / _GIB
        typer.echo(f"recommended at {world_size} ranks: nothing fits in {gib:g} GiB")
        return
    typer.echo(f"recommended at {world_size} ranks: {described(chosen.setup.config)}")
    for reason in chosen.reasons:
        typer.echo(f"  {reason}")


def _draw(question: Question, table: Table, out: Path) -> None:
    import pandas as pd  # noqa: PLC0415  slow to load, and only for figures

    from analysis.cost_model.strategy_map import strategy_map  # noqa: PLC0415
    from analysis.figures import files  # noqa: PLC0415
    from analysis.figures.prediction import scaling  # noqa: PLC0415
    from analysis.figures.strategy_map import links  # noqa: PLC0415

    rows = pd.DataFrame(_rows(question, table))
    name = question.model.name
    paths = files.save(scaling(rows, f"{name}. {_measured(question)}."), out, f"predicted_{name}")
    by_links = strategy_map(question, [size for size in table if size > 1])
    if by_links.empty:
        typer.echo(
            "no strategy map: no strategy fits into the memory of a rank on two ranks or more", err=True
        )
    else:
        caption = (
            f"{name}: K-FAC's fastest strategy a step that fits, and the time of the next over its. All is "
            f"predicted, {_measured(question)}. Hatched: the bounds of the two overlap."
        )
        paths += files.save(links(by_links, caption, "calibration"), out, f"strategy_map_{name}")
    for path in paths:
        typer.echo(str(path))
