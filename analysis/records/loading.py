"""Reads run folders into a `Study`; all numbers in tables and figures come from here.

Every row has a column `run`, the attempt it comes from: `<sweep>/<cell id>/attempt-<k>`. With it any number
can be traced back to its files.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.records.cache import cached
from analysis.records.counting_records import segment_columns
from analysis.records.left_out_notes import EmptyStudyWarning, LeftOutWarning, left_out_note
from analysis.records.record_files import read_records
from analysis.records.run_files import RunFiles, read_run
from analysis.records.sources import PathLike, flat, sources, unreadable_note
from analysis.records.study import FRAMES, Study
from analysis.rules import SCORINGS
from harness.cell import Cell
from harness.errors import StoreError
from harness.runs.archive import unpack
from harness.runs.arms import fields_of, name_arms
from harness.runs.store import DEFAULT_ROOT, SweepFolder
from kfac_core.schedule import Curve, Milestones


def load(*paths: PathLike | Iterable[PathLike], root: PathLike = DEFAULT_ROOT, cache: bool = True) -> Study:
    """Read any number of sweeps into one study.

        load("demo")                                   the sweep of this name under `root`
        load("results/runs/demo", "/data/runs/demo")   folders; two machines' cells of a sweep are one sweep
        load("results/runs")                           every sweep of a folder of runs
        load("a.tar.xz", "b.tar.xz")                   archives that `kronscale archive` wrote

    Each may also be a list of these; a path that is given twice counts once.

    The frames of a sweep are cached as Parquet in `derived/<sweep>/` beside the folder of its runs until a
    record file changes, unless `cache` is false. That folder can be deleted at any time; it is never made in
    the current directory.

    A run whose files are damaged, written by a newer version, or do not agree has no rows in any frame but
    `cells`, whose columns `valid` and `why` say so, and a `LeftOutWarning` is given; also for cells of
    another version, which have no row at all. A study without cells comes with an `EmptyStudyWarning`.

    Raises:
        StoreError: no path is given, a folder or an archive is missing or damaged, a folder is that of a
            single cell, or a cell is in several of them.
    """
    folders, archives = sources(flat(paths), Path(root))
    read = partial(cached, read=_read) if cache else _read
    parts = [read(folder) for folder in folders]
    notes = [unreadable_note(folder, len(part["cells"])) for folder, part in zip(folders, parts, strict=True)]
    parts += _from_archives(archives, notes)
    if len(parts) > 1:
        _refuse_twice(parts)
    frames = {
        name: pd.concat([part[name] for part in parts], ignore_index=True)
        if len(parts) > 1
        else parts[0][name]
        for name in ("cells", *FRAMES)
    }
    layers = frames["layers"]
    layers[ROLES] = layers[ROLES].map(lambda bounds: [int(rank) for rank in bounds])  # arrays, from Parquet
    rows = [fields_of(Cell.model_validate_json(text)) for text in frames["cells"].pop("cell_json")]
    named = name_arms(rows)
    frames["cells"].insert(3, "arm", [arm for arm, _ in named])
    frames["cells"].insert(4, "setting", [setting for _, setting in named])
    columns = dict.fromkeys(path for row in rows for path in row)
    table = {path: pd.Series([row.get(path) for row in rows], dtype="object") for path in columns}
    described = pd.DataFrame({"run": frames["cells"]["run"], **table})
    for note in filter(None, [*notes, left_out_note(frames["cells"])]):
        warnings.warn(note, LeftOutWarning, stacklevel=2)
    if frames["cells"].empty:
        places = ", ".join(map(str, [*folders, *archives]))
        warnings.warn(f"no cell in {places}: the study is empty", EmptyStudyWarning, stacklevel=2)
    return Study(fields=described, scoring=SCORINGS["first"], **frames)


def _from_archives(archives: Sequence[Path], notes: list[str]) -> list[dict[str, pd.DataFrame]]:
    """The frames of every sweep of the archives; the path of a run names its archive.

    Adds to `notes` what cannot be read.
    """
    if not archives:
        return []
    with tempfile.TemporaryDirectory() as folder:
        origin = unpack(archives, Path(folder))
        unpacked = sorted(Path(folder).iterdir())
        parts = [_read(path) for path in unpacked]
        for path, part in zip(unpacked, parts, strict=True):
            notes.append(unreadable_note(path, len(part["cells"])).replace(f"{folder}/", ""))
    for part in parts:
        paths = [Path(path) for path in part["cells"]["path"]]
        named = [f"{origin[path.parent]}:{path.relative_to(folder)}" for path in paths]
        part["cells"]["path"] = pd.Series(named, index=part["cells"].index, dtype="str")
    return parts


def _refuse_twice(parts: Sequence[dict[str, pd.DataFrame]]) -> None:
    cells = pd.concat([part["cells"][["sweep", "cell", "path"]] for part in parts], ignore_index=True)
    twice = cells[cells.duplicated(["sweep", "cell"], keep=False)]
    if len(twice):
        first = twice[twice["cell"] == twice["cell"].iloc[0]]
        raise StoreError(
            f"cell {first['sweep'].iloc[0]}/{first['cell'].iloc[0]} is in {' and in '.join(first['path'])}: "
            "leave one of them out"
        )


def _read(sweep_path: Path) -> dict[str, pd.DataFrame]:
    runs = [read_run(folder) for folder in SweepFolder(sweep_path).cell_folders()]
    records = read_records(runs)
    for files in runs:
        files.faults += records.faults.get(files.run, [])
    cells = pd.DataFrame([_cell_row(files) for files in runs], columns=list(CELL_COLUMNS)).set_index("run")
    cells.update(segment_columns(records.segments))
    valid = [files for files in runs if not files.faults]
    environments = [
        {"run": files.run, "key": key, "value": str(value)}
        for files in valid
        for key, value in files.environment.items()
    ]
    layers = [{"run": files.run, **layer} for files in valid for layer in files.layers]
    return {
        "cells": cells.reset_index().astype(CELL_COLUMNS),
        "windows": records.windows,
        "evaluations": records.evaluations,
        "metrics": records.metrics,
        "environments": pd.DataFrame(environments, columns=["run", "key", "value"], dtype="str"),
        "layers": pd.DataFrame(layers, columns=list(LAYER_COLUMNS)),
        "devices": records.devices,
    }


ROLES = ["factor_workers", "a_inverse_workers", "g_inverse_workers", "gradient_workers"]
LAYER_COLUMNS = ("run", "name", "a_dim", "a_blocks", "g_dim", "g_blocks", *ROLES)
CELL_COLUMNS = {
    "run": "str", "sweep": "str", "cell": "str", "method": "str", "world_size": "int64", "seed": "int64",
    "optimizer": "str", "strategy": "str", "solver": "str", "factor_update_steps": "Int64",
    "inverse_update_steps": "Int64", "grad_worker_fraction": "float64", "damping": "float64",
    "relative_damping": "float64", "schedules": "str",
    "workload": "str", "global_batch_size": "int64", "local_batch_size": "int64", "scaling": "str",
    "trial": "Int64", "target_metric": "str", "target_value": "float64", "target_direction": "str",
    "state": "str", "cause": "str", "stop_reason": "str", "reached_target": "boolean",
    "train_seconds": "float64", "value": "float64", "started_at": "float64", "ended_at": "float64",
    "oversubscribed": "bool", "site": "str", "block": "str", "attempt": "Int64", "attempts": "int64",
    "segments": "int64", "away_seconds": "float64", "bitwise": "bool", "moved": "str", "path": "str",
    "valid": "bool", "why": "str", "cell_json": "str",
}  # fmt: skip
"""Columns of `Study.cells` and their types; `cell_json` is dropped after the arms are named."""


def _cell_row(files: RunFiles) -> dict[str, Any]:
    cell = files.folder.cell()
    global_batch, local_batch = cell.training.batch_sizes(cell.world_size)
    row: dict[str, Any] = {
        "sweep": cell.sweep, "cell": cell.id, "method": cell.method, "world_size": cell.world_size,
        "seed": cell.seed, "optimizer": cell.optimizer.name, "workload": cell.workload.name,
        "global_batch_size": global_batch, "local_batch_size": local_batch, "scaling": cell.training.scaling,
        "target_metric": cell.target.metric, "target_value": cell.target.value,
        "target_direction": cell.target.direction, "trial": cell.trial, "cell_json": cell.model_dump_json(),
        "attempts": files.attempts, "cause": "", "stop_reason": "",
        "segments": 1, "away_seconds": 0.0, "bitwise": True, "moved": files.moved,
        "valid": not files.faults, "why": "; ".join(files.faults),
    }  # fmt: skip
    options = {name: getattr(cell.kfac, name, None) for name in KFAC_COLUMNS}
    scheduled = {name: value for name, value in options.items() if isinstance(value, Milestones | Curve)}
    row |= options | dict.fromkeys(scheduled)
    row["schedules"] = "; ".join(f"{name} {value}" for name, value in scheduled.items())
    return row | _attempt_fields(files)


KFAC_COLUMNS = (
    "strategy", "solver", "factor_update_steps", "inverse_update_steps", "grad_worker_fraction", "damping",
    "relative_damping",
)  # fmt: skip
OUTCOME_COLUMNS = (
    "state", "cause", "stop_reason", "reached_target", "train_seconds", "value", "started_at", "ended_at",
)  # fmt: skip


NUMBERS = ("reached_target", "train_seconds", "value", "started_at", "ended_at")
"""Columns of an outcome that are empty if the run is not valid, so that nothing is computed from them."""


def _attempt_fields(files: RunFiles) -> dict[str, Any]:
    attempt = files.attempt
    row: dict[str, Any] = {
        "run": files.run,
        "state": files.state,
        "oversubscribed": files.launch.oversubscribed,
        "site": str(files.launch.site or ""),
        "block": _block(files),
        "path": str(attempt.path if attempt is not None else files.folder.path),
    }
    if attempt is None:
        return row
    row["attempt"] = attempt.number
    if files.outcome is not None:
        row |= {name: getattr(files.outcome, name) for name in OUTCOME_COLUMNS}
    if files.faults:
        row |= dict.fromkeys(NUMBERS)
    return row


def _block(files: RunFiles) -> str:
    """The block of a run: its allocation or, on one host, its seed; runs of a block share conditions.

    A local queue starts cells seed after seed (`harness.study.start_cells.in_blocks`), so runs of one seed
    are neighbours in time.
    """
    launch, folder = files.launch, files.folder
    if launch.allocation:
        return str(launch.allocation)
    if launch.launcher != "local":
        return ""
    return f"{folder.path.parent.name}@{launch.host} seed {folder.cell().seed}"
