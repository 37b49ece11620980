"""`kronscale recommend`, and `predict --from`: what follows from the runs of a study on small worlds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli import completion
from harness.cli.options import RUNS, AsJson, Runs
from harness.cli.prediction_options import FROM_HELP, LINKS_HELP, MOST_RANKS, memory_bytes
from harness.cli.study_tables import print_predictions, print_recommendation
from harness.errors import UserError

if TYPE_CHECKING:
    from analysis.study_prediction.prediction import StudyModel


def recommend(
    sweep: Annotated[
        str,
        typer.Argument(metavar="SWEEP", help=FROM_HELP, autocompletion=completion.stored_sweeps),
    ],
    world_size: Annotated[int, typer.Option(metavar="N", min=1, max=MOST_RANKS, help="Ranks to train on.")],
    calibration: Annotated[str | None, typer.Option(metavar="NAME", help=LINKS_HELP)] = None,
    memory_gib: Annotated[
        float | None,
        typer.Option(metavar="GIB", min=0, help="Memory per rank; what needs more is left out."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder to draw the maps in, up to N ranks: over link speed, and over intervals.",
        ),
    ] = None,
    runs: Runs = RUNS,
    as_json: AsJson = False,
) -> None:
    """Say which strategy, fraction and intervals to use at a world size, from a study's own runs.

    Compares the study's arms, and KAISA's other numbers of gradient workers, by the time to the target where
    the study reached it, else by the step: measured where it was measured, predicted elsewhere.
    """
    from analysis.cost_model.errors import CostModelError  # noqa: PLC0415  slow to load
    from analysis.study_prediction.answers import recommendation  # noqa: PLC0415

    try:
        model = _fitted_model(sweep, runs, calibration)
        content = recommendation(model, world_size, None if memory_gib is None else memory_bytes(memory_gib))
        paths = [] if out is None else _draw_maps(model, world_size, out)
    except CostModelError as error:
        raise UserError(f"{sweep}: {error}") from None
    if as_json:
        typer.echo(json.dumps(content, indent=1))
        return
    print_recommendation(content)
    for path in paths:
        typer.echo(str(path))


def predict_study(
    sweep: str, runs: Path, sizes: list[int] | None, calibration: str | None, as_json: bool
) -> None:
    """Print the study's arms at these world sizes, by default up to 8 times the largest measured one.

    Raises:
        UserError: there is no such study, or nothing can be predicted from it.
    """
    from analysis.cost_model.errors import CostModelError  # noqa: PLC0415  slow to load
    from analysis.study_prediction.answers import predictions  # noqa: PLC0415

    try:
        content = predictions(_fitted_model(sweep, runs, calibration), sizes)
    except CostModelError as error:
        raise UserError(f"{sweep}: {error}") from None
    if as_json:
        typer.echo(json.dumps(content, indent=1))
    else:
        print_predictions(content)


def _fitted_model(sweep: str, runs: Path, calibration: str | None) -> StudyModel:
    """The laws of a study: the name of a sweep, the folder of one, or an archive.

    Raises:
        UserError: there is none.
        CostModelError: nothing can be predicted from it.
    """
    from analysis.cost_model.calibration_file import read_calibration  # noqa: PLC0415  slow to load
    from analysis.records.left_out import left_out_note, quietly  # noqa: PLC0415
    from analysis.records.tables import load  # noqa: PLC0415
    from analysis.study_prediction.links import from_calibration  # noqa: PLC0415
    from analysis.study_prediction.prediction import study_model  # noqa: PLC0415
    from analysis.study_prediction.reading import measured  # noqa: PLC0415
    from harness.cli.cell_selection import stored_sweep  # noqa: PLC0415
    from harness.cli.output import print_note  # noqa: PLC0415
    from harness.runs.store import SweepFolder  # noqa: PLC0415

    links = None if calibration is None else from_calibration(read_calibration(calibration))
    path = Path(sweep)
    if not path.is_file():
        if len(path.parts) == 1 or not path.is_dir():
            path = stored_sweep(sweep, runs).path
        if not SweepFolder(path).holds_cells():
            raise UserError(f"{path} holds no cells; give the folder of a sweep, such as {runs / 'demo'}")
    with quietly():
        study = load(path, cache=path.resolve().parent == runs.resolve())
    print_note(left_out_note(study.cells))
    return study_model(measured(study), links)


def _draw_maps(model: StudyModel, world_size: int, out: Path) -> list[Path]:
    """Over link speed and, if the study has K-FAC, over update intervals."""
    from analysis.figures import files, strategy_map  # noqa: PLC0415  see recommend
    from analysis.study_prediction.bounds import LEVEL  # noqa: PLC0415
    from analysis.study_prediction.strategy_map import interval_map  # noqa: PLC0415
    from analysis.study_prediction.strategy_map import strategy_map as by_links  # noqa: PLC0415

    own = model.measured.world_sizes
    further = (own[-1] * 2**power for power in range(1, MOST_RANKS.bit_length()))
    sizes = sorted({*own, *(size for size in further if size < world_size), world_size})
    rows = by_links(model, sizes)
    name = model.measured.name
    about = (
        f"Framed: measured; else predicted, links: {model.links.source}. "
        f"Hatched: {LEVEL:.0%} bounds of the two fastest overlap."
    )
    caption = f"{name}: the fastest arm {rows['unit'].iloc[0]}, and the time of the next over its. {about}"
    paths = files.save(strategy_map.links(rows, caption), out, f"strategy_map_{name.replace(' ', '_')}")
    intervals = interval_map(model, sizes)
    if not intervals.empty:
        caption = (
            f"{name}: the K-FAC arm with the fastest step by update interval, and its step over that of the "
            f"fastest arm without K-FAC: how many times fewer epochs it must need. {about}"
        )
        drawing = strategy_map.intervals(intervals, caption)
        paths += files.save(drawing, out, f"interval_map_{name.replace(' ', '_')}")
    return paths
