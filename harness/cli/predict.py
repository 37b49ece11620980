"""`kronscale predict`: step times at world sizes that nobody ran."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import TypeAdapter, ValidationError

from harness.cell import MOST_RANKS
from harness.cli import completion
from harness.cli.cell_selection import stored_sweep
from harness.cli.options import RUNS, AsJson, Runs
from harness.cli.output import console, figure_table, print_note
from harness.errors import UserError
from harness.runs.store import SweepFolder
from harness.yaml_files.document import read_value
from harness.yaml_files.validation_messages import explain
from kfac_core.config import KFACConfig, nearest

if TYPE_CHECKING:
    from analysis.prediction.prediction import StudyModel

_MOST_GIB = 2**20
_SHOWN = 8  # candidates of a world size that the table has


def predict(
    sweep: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="SWEEP",
            help="Sweep with completed runs of small worlds: its name, folder or archive.",
            autocompletion=completion.stored_sweeps,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A paper's network on 64 published GPUs: resnet50, bert_large."),
    ] = None,
    world_size: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Ranks: 16,64. Default: up to 8 times those measured."),
    ] = None,
    memory_gib: Annotated[
        float | None,
        typer.Option(metavar="GIB", min=0, help="Memory per rank; what needs more is left out."),
    ] = None,
    local_batch_size: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Of --model: examples per rank. Default: 32.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="Of --model: a field of K-FAC, solver=inverse."),
    ] = None,
    runs: Runs = RUNS,
    as_json: AsJson = False,
) -> None:
    """Predict steps, memory and time to the target at any world size, and recommend a strategy.

    With --from, the study's windows give the times, its exchanges the links, its repeats and held-out worlds
    the bounds. KAISA's other numbers of gradient workers are predicted too.
    """
    if (model is None) == (sweep is None):
        raise UserError("predict needs either --from SWEEP, a study with small worlds, or --model NAME")
    from analysis.prediction.answers import predictions  # noqa: PLC0415  pandas
    from analysis.prediction.errors import PredictionError  # noqa: PLC0415

    sizes = None if world_size is None else _sizes(world_size)
    try:
        if sweep is not None:
            if local_batch_size is not None or set_:
                raise UserError("--local-batch-size and --set have no effect with --from: its cells set them")
            fitted = _study_model(sweep, runs)
        else:
            fitted = _machine_model(model or "", set_ or (), local_batch_size or 32)
        content = predictions(fitted, sizes, None if memory_gib is None else _memory_bytes(memory_gib))
    except PredictionError as error:
        raise UserError(f"{sweep or '--model'}: {error}") from None
    if as_json:
        typer.echo(json.dumps(content, indent=1))
    else:
        _print(content)


def _study_model(sweep: str, runs: Path) -> StudyModel:
    """The laws of a study: the name of a sweep, the folder of one, or an archive."""
    from analysis.prediction.prediction import study_model  # noqa: PLC0415  pandas
    from analysis.prediction.reading import measured  # noqa: PLC0415
    from analysis.records.left_out_notes import left_out_note, quietly  # noqa: PLC0415
    from analysis.records.loading import load  # noqa: PLC0415

    path = Path(sweep)
    if not path.is_file():
        if len(path.parts) == 1 or not path.is_dir():
            path = stored_sweep(sweep, runs).path
        if not SweepFolder(path).holds_cells():
            raise UserError(f"{path} holds no cells; give the folder of a sweep, such as {runs / 'demo'}")
    with quietly():
        study = load(path, cache=path.resolve().parent == runs.resolve())
    print_note(left_out_note(study.cells))
    return study_model(measured(study))


def _sizes(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    whole = [int(part) for part in parts if part.isascii() and part.isdecimal() and len(part) < 10]
    if len(whole) < len(parts) or not all(1 <= size <= MOST_RANKS for size in whole):
        raise UserError(
            f"--world-size {text[:100]}: sizes must be whole numbers from 1 to {MOST_RANKS}; write 64,4096"
        )
    return sorted(set(whole))


def _memory_bytes(gib: float) -> int:
    if not 0 < gib <= _MOST_GIB:  # also of NaN
        raise UserError(f"--memory-gib={gib:g} must be a number of GiB > 0 and <= {_MOST_GIB}")
    return round(gib * 2**30)


def _machine_model(name: str, pairs: Sequence[str], local_batch_size: int) -> StudyModel:
    """A network on the published machine, with K-FAC's settings from `FIELD=VALUE`."""
    from analysis.prediction.machine import RTX_2080_TI  # noqa: PLC0415  scipy
    from analysis.prediction.networks import network_named  # noqa: PLC0415

    fields = tuple(KFACConfig.__dataclass_fields__)
    values: dict[str, Any] = {"solver": next(iter(RTX_2080_TI.inverse))}
    for pair in pairs:
        field, sign, value = pair.partition("=")
        if not sign or not value.strip() or field not in fields:
            raise UserError(f"--set {pair}: write FIELD=VALUE, with a field of K-FAC{nearest(field, fields)}")
        if field in ("strategy", "grad_worker_fraction"):
            raise UserError(f"--set {pair}: predict shows every strategy and fraction")
        values[field] = read_value(value, f"--set {field}", UserError)
    try:  # as a sweep's section is read: as JSON, where a list may become a tuple
        config: KFACConfig = TypeAdapter(KFACConfig).validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        place, sentence = explain(error)
        raise UserError(f"--set {place[0] if place else ''}{sentence}") from None
    return RTX_2080_TI.model(network_named(name), config, local_batch_size)


def _print(content: Mapping[str, Any]) -> None:
    """A table and a sentence for each world size, and the notes."""
    screen = console()
    to_target = any(world["to_target"] for world in content["worlds"])
    timed = ("s to target", "low", "high") if to_target else ()
    columns = ("", "ranks", "ms a step", "low", "high", *timed, "GiB", "most of it", "how")
    grid = figure_table(content["study"], columns, "", "most of it", "how")
    for world in content["worlds"]:
        listed = world["candidates"]
        shown = [one for index, one in enumerate(listed) if index < _SHOWN or one["ran"]]
        for one in shown:
            cells = [f"{1e3 * one[name]:.4g}" for name in ("seconds", "low", "high")]
            if to_target:
                totals = (one[name] for name in ("seconds_to_target", "low_to_target", "high_to_target"))
                cells += ["" if total is None else f"{total:.4g}" for total in totals]
            memory = "" if one["peak_bytes"] is None else f"{one['peak_bytes'] / 2**30:.3g}"
            how = "measured" if one["measured"] else "predicted" if one["ran"] else "predicted, never run"
            size = str(world["world_size"])
            grid.add_row(one["name"], size, *cells, memory, one["largest_phase"], how)
        grid.add_section()
    screen.print(grid)
    for line in (*(world["recommendation"] for world in content["worlds"]), *content["notes"]):
        screen.print(line, markup=False, highlight=False, soft_wrap=True)
