"""Reads run folders into a `Study`; all numbers in tables and figures come from here.

Every row has a column `run`, the attempt it comes from: `<sweep>/<cell id>/attempt-<k>`. With it any number
can be traced back to its files.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.records.cache import cached
from analysis.records.record_files import read_records
from analysis.records.segments import segment_columns
from analysis.records.study import LONG_FRAMES, Study
from analysis.rules import SCORINGS
from harness.cell import Cell
from harness.errors import StoreError
from harness.runs.arms import fields_of, name_arms
from harness.runs.records import SCHEMA_VERSION
from harness.runs.store import DEFAULT_ROOT, Attempt, CellFolder, SweepFolder
from kfac_core.schedule import Milestones

PathLike = str | os.PathLike[str]


def load(paths: PathLike | Sequence[PathLike], root: PathLike = DEFAULT_ROOT, *, cache: bool = True) -> Study:
    """Read sweeps: folders, or names of sweeps under `root`.

    The frames of a sweep are cached as Parquet in `derived/<sweep>/` beside the folder of its runs until a
    record file changes, unless `cache` is false. That folder can be deleted at any time.

    Raises:
        StoreError: a folder is missing, or a file is damaged or written by a newer version.
    """
    several = [paths] if isinstance(paths, str | os.PathLike) else paths
    read = partial(cached, read=_read) if cache else _read
    parts = [read(_sweep_path(path, Path(root))) for path in several]
    frames = {
        name: pd.concat([part[name] for part in parts], ignore_index=True)
        if len(parts) > 1
        else parts[0][name]
        for name in ("cells", *LONG_FRAMES)
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
    return Study(fields=described, scoring=SCORINGS["first"], **frames)


def _sweep_path(path: PathLike, root: Path) -> Path:
    for candidate in (Path(path), root / path):
        if candidate.is_dir():
            return candidate
    also = f" nor at {root / path}" if len(Path(path).parts) == 1 else ""
    raise StoreError(f"no run folder at {path}{also}; `kronscale run` or `submit` makes one")


def _read(sweep_path: Path) -> dict[str, pd.DataFrame]:
    rows: list[dict[str, Any]] = []
    files: list[tuple[str, Path]] = []
    environments: list[dict[str, str]] = []
    layers: list[dict[str, Any]] = []
    for cell_folder in SweepFolder(sweep_path).cell_folders():
        attempt = _attempt_that_counts(cell_folder)
        row = _cell_row(cell_folder, attempt)
        rows.append(row)
        if attempt is not None:
            for one in reversed(attempt.lineage()):  # a resumed run has records in several attempts
                files.extend((row["run"], path) for path in sorted(one.path.glob("rank-*.jsonl")))
            environment = attempt.read("environment.json") or {}
            environments.extend(
                {"run": row["run"], "key": k, "value": str(v)} for k, v in environment.items()
            )
            described = (attempt.read("layers.json") or {}).get("layers", [])
            layers.extend({"run": row["run"], **layer} for layer in described)
    records = read_records(files)
    cells = pd.DataFrame(rows, columns=list(CELL_COLUMNS)).set_index("run")
    cells.update(segment_columns(records.segments))
    return {
        "cells": cells.reset_index().astype(CELL_COLUMNS),
        "phases": records.phases,
        "memory": records.memory,
        "evaluations": records.evaluations,
        "environments": pd.DataFrame(environments, columns=["run", "key", "value"], dtype="str"),
        "layers": pd.DataFrame(layers, columns=list(LAYER_COLUMNS)),
        "devices": records.devices,
    }


def _attempt_that_counts(folder: CellFolder) -> Attempt | None:
    attempts = folder.attempts()
    completed = [attempt for attempt in attempts if _outcome(attempt).get("state") == "COMPLETED"]
    counting = completed or attempts
    return counting[-1] if counting else None


def _outcome(attempt: Attempt) -> dict[str, Any]:
    outcome = attempt.read("outcome.json") or {}
    if outcome.get("schema", 0) > SCHEMA_VERSION:
        raise StoreError(
            f"{attempt.path / 'outcome.json'} has schema {outcome['schema']}; this version of Kronscale "
            f"reads schemas up to {SCHEMA_VERSION}: update it, or remove this run"
        )
    return outcome


ROLES = ["factor_workers", "a_inverse_workers", "g_inverse_workers", "gradient_workers"]
LAYER_COLUMNS = ("run", "name", "a_dim", "a_blocks", "g_dim", "g_blocks", *ROLES)
CELL_COLUMNS = {
    "run": "str", "sweep": "str", "cell": "str", "method": "str", "world_size": "int64", "seed": "int64",
    "optimizer": "str", "strategy": "str", "solver": "str", "factor_update_steps": "Int64",
    "inverse_update_steps": "Int64", "grad_worker_fraction": "float64", "damping": "float64",
    "schedules": "str",
    "workload": "str", "global_batch_size": "int64", "local_batch_size": "int64", "scaling": "str",
    "target_metric": "str", "target_value": "float64", "target_direction": "str",
    "state": "str", "cause": "str", "stop_reason": "str", "reached_target": "boolean",
    "train_seconds": "float64", "value": "float64", "started_at": "float64", "ended_at": "float64",
    "oversubscribed": "bool", "site": "str", "block": "str", "attempt": "Int64", "attempts": "int64",
    "segments": "int64", "away_seconds": "float64", "bitwise": "bool", "path": "str", "cell_json": "str",
}  # fmt: skip
"""Columns of `Study.cells` and their types; `cell_json` is dropped after the arms are named."""


def _cell_row(folder: CellFolder, attempt: Attempt | None) -> dict[str, Any]:
    cell = folder.cell()
    global_batch, local_batch = cell.training.batch_sizes(cell.world_size)
    row: dict[str, Any] = {
        "sweep": cell.sweep, "cell": cell.id, "method": cell.method, "world_size": cell.world_size,
        "seed": cell.seed, "optimizer": cell.optimizer.name, "workload": cell.workload.name,
        "global_batch_size": global_batch, "local_batch_size": local_batch, "scaling": cell.training.scaling,
        "target_metric": cell.target.metric, "target_value": cell.target.value,
        "target_direction": cell.target.direction, "cell_json": cell.model_dump_json(),
        "attempts": len(folder.attempts()), "cause": "", "stop_reason": "",
        "segments": 1, "away_seconds": 0.0, "bitwise": True,
    }  # fmt: skip
    options = {name: getattr(cell.kfac, name, None) for name in KFAC_COLUMNS}
    scheduled = {name: value for name, value in options.items() if isinstance(value, Milestones)}
    row |= options | dict.fromkeys(scheduled)
    row["schedules"] = "; ".join(f"{name} {value}" for name, value in scheduled.items())
    return row | _attempt_fields(folder, attempt)


KFAC_COLUMNS = (
    "strategy", "solver", "factor_update_steps", "inverse_update_steps", "grad_worker_fraction", "damping",
)  # fmt: skip
OUTCOME_COLUMNS = (
    "state", "cause", "stop_reason", "reached_target", "train_seconds", "value", "started_at", "ended_at",
)  # fmt: skip


def _attempt_fields(folder: CellFolder, attempt: Attempt | None) -> dict[str, Any]:
    sweep = folder.path.parent.name
    if attempt is None:
        path, run = folder.path, f"{sweep}/{folder.id}"
        return {
            "run": run,
            "state": "STAGED",
            "oversubscribed": False,
            "site": "",
            "block": "",
            "path": str(path),
        }
    launch = attempt.read("launch.json") or {}
    outcome = _outcome(attempt) or {"state": "RUNNING" if _has_records(attempt) else "PENDING"}
    return {
        "run": f"{sweep}/{folder.id}/{attempt.path.name}",
        "oversubscribed": bool(launch.get("oversubscribed", False)),
        "site": str(launch.get("site") or ""),
        "block": _block(launch, folder),
        "attempt": attempt.number,
        "path": str(attempt.path),
    } | {name: outcome[name] for name in OUTCOME_COLUMNS if name in outcome}


def _block(launch: Mapping[str, Any], folder: CellFolder) -> str:
    """The block of a run: its allocation or, on one host, its seed; runs of a block share conditions.

    A local queue starts cells seed after seed (`harness.study.submit.in_blocks`), so runs of one seed are
    neighbours in time.
    """
    if launch.get("allocation"):
        return str(launch["allocation"])
    if launch.get("launcher") != "local":
        return ""
    return f"{folder.path.parent.name}@{launch.get('host', '')} seed {folder.cell().seed}"


def _has_records(attempt: Attempt) -> bool:
    return any(path.stat().st_size for path in attempt.path.glob("rank-*.jsonl"))
