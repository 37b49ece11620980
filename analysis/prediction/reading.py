"""Reads a `Study` as what predictions need of it: arms, their settings, and their measured worlds."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from pydantic import TypeAdapter, ValidationError

from analysis.metrics import time_to_accuracy
from analysis.prediction.arms import Arm, Measured, World
from analysis.prediction.errors import PredictionError
from analysis.prediction.networks import Network
from analysis.prediction.work import ITEM
from analysis.records.study import Study
from analysis.steps import counting_windows, memory_peaks, peak_bytes, rank_phase_costs, run_speeds, waits
from harness.cell import Training
from kfac_core.config import KFACConfig
from kfac_core.phases import COMM_PHASES
from kfac_core.placement import FactorShape, LayerShape

_INTERVALS = ("factor_update_steps", "inverse_update_steps")


def measured(study: Study) -> Measured:
    """Everything that predictions need of a study.

    Raises:
        PredictionError: it has no completed run with records.
    """
    cells = study.cells
    recorded = study.windows["run"].astype("str").unique()
    usable = (cells["state"] == "COMPLETED") & cells["valid"] & cells["run"].isin(recorded)
    if not usable.any():
        raise PredictionError("no completed run with records, so there is nothing to predict from")
    notes = []
    shared = usable & cells["oversubscribed"]
    if shared.any() and (usable & ~cells["oversubscribed"]).any():
        usable &= ~cells["oversubscribed"]
        notes.append(f"left out: {shared.sum()} runs with more ranks than CPUs, whose ranks took turns")
    elif shared.any():
        notes.append("all runs had more ranks than CPUs: their times are of ranks that took turns")
    part = study.only(usable)
    libraries = _algorithms(part)
    if len(libraries) > 1:
        raise PredictionError(f"has runs of {' and of '.join(libraries)}; give a sweep of one library")
    tables = _Tables.of(part)
    arms = []
    for name, own in part.cells.groupby("arm", sort=False):
        try:
            arms.append(_arm(str(name), own, part, tables))
        except PredictionError as error:
            notes.append(f"left out: {name}: {error}")
    if not arms:
        raise PredictionError("; ".join(notes))
    name, algorithm = " and ".join(part.sweeps), next(iter(libraries), "gloo")
    return Measured(name, algorithm, _examples(part), tuple(arms), _on_one_host(part), tuple(notes))


@dataclass(frozen=True)
class _Tables:
    """Of all arms: `analysis.steps` by rank and phase, and by run."""

    costs: pd.DataFrame
    transfers: pd.DataFrame
    speeds: pd.Series
    windows: pd.DataFrame
    models: pd.Series
    scored: pd.DataFrame
    memory: pd.Series

    @classmethod
    def of(cls, study: Study) -> _Tables:
        costs = rank_phase_costs(study)
        costs["phase"] = costs["phase"].astype("str")
        frame = counting_windows(study)
        by_window = frame.assign(log=np.log(frame["wall_seconds"] / frame["steps"]))
        logs = by_window.groupby(["run", "first_step"], observed=True)["log"].mean()
        windows = logs.groupby("run", observed=True).agg(["var", "count"]).reset_index()
        peaks = memory_peaks(study)
        models = peaks[peaks["kind"] == "model"].groupby("run")["bytes"].max()
        speeds = run_speeds(study).set_index("run")["seconds_per_step"]
        return cls(
            costs, waits(study), speeds, windows.astype({"run": "str"}), models, time_to_accuracy(study),
            peak_bytes(study).set_index("run")["peak_bytes"],
        )  # fmt: skip


def _algorithms(study: Study) -> list[str]:
    frame = study.environments
    found = frame.loc[frame["key"] == "backend", "value"].unique()
    return sorted({"nccl" if value == "nccl" else "gloo" for value in found})


def _on_one_host(study: Study) -> bool:
    """Unknown hosts, as of older records, count as several: nothing is said about them."""
    frame = study.environments
    values = frame.loc[frame["key"] == "hosts", "value"]
    return len(values) > 0 and all(len(set(re.findall(r"'([^']*)'", value))) == 1 for value in values)


def _arm(name: str, cells: pd.DataFrame, study: Study, tables: _Tables) -> Arm:
    fields = study.fields[study.fields["run"].isin(cells["run"])].iloc[0].to_dict()
    known = {str(path): value for path, value in fields.items()}
    config, training = _config(known), Training.model_validate(_section(known, "training"))
    if start := training.kfac_start_epoch:
        raise PredictionError(f"its K-FAC starts at epoch {start:g}, so that its steps have no one time")
    worlds = {int(str(size)): _world(own, tables) for size, own in cells.groupby("world_size")}
    network = _network(name, cells, study, tables, config)
    return Arm(name, network, config, training, worlds, _epochs(name, tables))


def _section(fields: Mapping[str, Any], section: str) -> dict[str, Any]:
    """A section of a cell from its dotted paths."""
    found: dict[str, Any] = {}
    for path, value in fields.items():
        *parents, last = path.split(".")
        is_known = value is not None and not (isinstance(value, float) and math.isnan(value))
        if parents and parents[0] == section and is_known:
            inner = found
            for parent in parents[1:]:
                inner = inner.setdefault(parent, {})
            inner[last] = value
    return found


def _config(fields: Mapping[str, Any]) -> KFACConfig | None:
    section = _section(fields, "kfac")
    if not section:
        return None
    for field in _INTERVALS:
        if isinstance(section.get(field), str):
            raise PredictionError(
                f"its {field} changes over time ({section[field]}), which has no one step time"
            )
    # Other schedules, such as of the damping, change no cost; neither does a text that is not one
    kept = {field: value for field, value in section.items() if field in _OF_COST}
    try:
        return TypeAdapter(KFACConfig).validate_python(kept)
    except ValidationError as error:
        raise PredictionError(f"its settings of K-FAC cannot be read: {error.errors()[0]['msg']}") from None


_OF_COST = (
    "strategy", "grad_worker_fraction", "assignment", "split_factors", "costs", "solver", "eigen_rank",
    "factor_update_steps", "inverse_update_steps", "overlap_factors", "factor_dtype", "inverse_dtype",
    "max_factor_dim",
)  # fmt: skip
"""Fields of K-FAC on which placement, traffic or work depends."""


def _network(
    name: str, cells: pd.DataFrame, study: Study, tables: _Tables, config: KFACConfig | None
) -> Network:
    runs = set(cells["run"])
    sizes = [tables.models[run] for run in runs if run in tables.models.index]
    parameters = round(max(sizes, default=0) / ITEM)  # float32 in every precision of a run
    if config is None:
        return Network(name, (), parameters)
    rows = study.layers[study.layers["run"].isin(runs)]
    if rows.empty:
        raise PredictionError("its runs have no layers.json (they are of an older version)")
    first = rows[rows["run"] == rows["run"].iloc[0]]
    shapes = tuple(_shape(row) for row in first.itertuples(index=False))
    own = sum(shape.gradient_elements for shape in shapes)
    return Network(name, shapes, max(0, parameters - own))


def _shape(row: Any) -> LayerShape:
    a, g = FactorShape(row.a_dim, row.a_blocks), FactorShape(row.g_dim, row.g_blocks)
    # Layers of one group have a dense G; of an embedding, A alone is diagonal and nothing needs to say so
    is_diagonal = g.dim == 1 and g.blocks > 1
    diagonal = ("ag" if a.dim == 1 and a.blocks > 1 else "g") if is_diagonal else ""
    return LayerShape(row.name, a, g, diagonal)


def _world(cells: pd.DataFrame, tables: _Tables) -> World:
    runs = list(cells["run"])
    costs = tables.costs[tables.costs["run"].isin(runs)]
    computing = costs[~costs["phase"].isin([phase.value for phase in COMM_PHASES])]
    means = computing.groupby(["phase", "rank"])["seconds_per_step"].mean()
    ranks = {str(phase): tuple(map(float, own.sort_index())) for phase, own in means.groupby(level="phase")}
    moving = tables.transfers[tables.transfers["run"].isin(runs)]
    transfers = moving.groupby("phase")["transfer_seconds_per_step"].mean()
    windows = tables.windows[tables.windows["run"].isin(runs)]
    spread = math.sqrt(windows["var"].mean()) if windows["var"].notna().any() else 0.0
    return World(
        tuple(float(tables.speeds[run]) for run in runs),
        spread,
        float(windows["count"].mean()),
        ranks,
        {str(phase): float(seconds) for phase, seconds in transfers.items()},
        float(tables.memory[tables.memory.index.isin(runs)].median()),
    )


def _epochs(name: str, tables: _Tables) -> dict[int, float]:
    """By world size, the median epochs to the target; a miss counts as infinity."""
    scored = tables.scored[tables.scored["arm"] == name]
    medians = scored.groupby("world_size")["scored_epochs"].median()
    return {int(str(size)): float(epochs) for size, epochs in medians.items() if math.isfinite(epochs)}


def _examples(study: Study) -> float:
    """Examples of an epoch; 0 without evaluations."""
    later = study.evaluations[study.evaluations["epoch"] > 0]
    return float((later["samples"] / later["epoch"]).median()) if len(later) else 0.0
