"""Held-out worlds of committed measurements, predicted from smaller ones: the points of the validation.

`two_ranks` reads studies that the harness ran on one rank and two; links come from a calibration of the same
machine. `shaped` reads real steps on 4 and 8 ranks with limited links, predicted from 1 and 2 alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.cost_model.fitting import baselines
from analysis.cost_model.models import Model, read_model
from analysis.cost_model.models.stored import StoredModel, stored_layer
from analysis.records.tables import load
from analysis.study_prediction.links import Links
from analysis.study_prediction.measured import Arm, Measured, World
from analysis.study_prediction.prediction import StudyModel, study_model
from analysis.study_prediction.reading import measured
from harness.cell import Training
from kfac_core.config import KFACConfig
from kfac_core.placement import FactorShape, LayerShape
from kfac_core.timing.phases import COMM_PHASES

BASELINES = ("constant", "amdahl", "extra_p", "extra_p_linear")
_COMM = {phase.value for phase in COMM_PHASES}


@dataclass(frozen=True)
class Timed:
    """Steps measured outside of the harness.

    Attributes:
        rows: `arm`, `world_size`, `window`, `rank`, `phase`, `seconds_per_step`.
        model: whose steps they are.
        intervals: F and E.
        solver: of K-FAC.
        batch: examples of a rank.
    """

    rows: pd.DataFrame
    model: Model
    intervals: tuple[int, int]
    solver: str
    batch: int

    def study(self, sizes: Sequence[int]) -> Measured:
        """What predictions need, of these world sizes."""
        arms = tuple(self.arm(name, sizes) for name in dict.fromkeys(self.rows["arm"]))
        return Measured("shaped", "gloo", 0.0, arms, False, ())

    def arm(self, name: str, sizes: Sequence[int]) -> Arm:
        """One arm; hybrid_opt has half of the ranks as gradient workers."""
        config = None
        if name != "sgd":
            fraction = 0.5 if name == "hybrid_opt" else None
            config = KFACConfig(
                strategy=name, grad_worker_fraction=fraction, solver=self.solver,
                factor_update_steps=self.intervals[0], inverse_update_steps=self.intervals[1],
            )  # fmt: skip
        own = self.rows[self.rows["arm"] == name]
        worlds = {size: world(own[own["world_size"] == size]) for size in sizes}
        training = Training(local_batch_size=self.batch, epochs=1, gradient_averaging="flat")
        return Arm(name, self.model, config, training, worlds, {})


def world(rows: pd.DataFrame) -> World:
    """One arm's world; transfers are those of the rank that came last and so waited for nobody."""
    walls = rows[rows["phase"] == "total"].groupby("window")["seconds_per_step"].max()
    moving = rows[rows["phase"].isin(_COMM)].groupby(["phase", "window"])["seconds_per_step"].min()
    rest = rows[~rows["phase"].isin({*_COMM, "total"})].groupby(["phase", "rank"])["seconds_per_step"].mean()
    logs = walls.map(math.log)
    return World(
        (math.exp(logs.mean()),), logs.std(), len(walls),
        {str(phase): tuple(own) for phase, own in rest.groupby(level="phase")},
        {str(phase): float(own.mean()) for phase, own in moving.groupby(level="phase")},
    )  # fmt: skip


def perceptron(folder: Path) -> Timed:
    """The measurements of `shaped_links.py`."""
    return Timed(
        pd.read_csv(folder / "shaped_links_steps.csv"), read_model("perceptron"), (2, 4), "inverse", 16
    )


def networks(folder: Path) -> dict[str, Timed]:
    """The measurements of `shaped_networks.py`, by case."""
    layers = pd.read_csv(folder / "shaped_networks_layers.csv")
    shapes = tuple(
        LayerShape(row.layer, FactorShape(row.a_dim), FactorShape(row.g_dim))
        for row in layers.itertuples(index=False)
    )
    own = sum(shape.gradient_elements for shape in shapes)
    rest = int(layers["model_parameters"].iloc[0]) - own
    tables = tuple(map(stored_layer, shapes))
    model = StoredModel("resnet20", tables, rest, stored=shapes)
    found = {}
    for path in sorted(folder.glob("shaped_networks_*-bound.csv"), reverse=True):  # links first
        rows, case = pd.read_csv(path), path.stem.removeprefix("shaped_networks_")
        found[case] = Timed(rows, model, (2, 4), "eigen", int(rows["batch"].iloc[0]))
    return found


def shaped(
    name: str, timed: Timed, known: Sequence[int], held_out: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Points of worlds on shaped links."""
    model = study_model(timed.study(known))
    yield from _points(name, model, timed.study([*known, *held_out]), known, held_out)


def two_ranks(name: str, archive: Path, links: Links) -> Iterator[dict[str, Any]]:
    """Points of a study of the harness: two ranks from one, with the links of a calibration."""
    study = measured(load(archive, cache=False))
    alone = replace(
        study, arms=tuple(replace(arm, worlds={1: arm.worlds[1]}) for arm in study.arms if 1 in arm.worlds)
    )
    yield from _points(name, study_model(alone, links), study, (1,), (2,))


def _points(
    name: str, model: StudyModel, whole: Measured, known: Sequence[int], held_out: Sequence[int]
) -> Iterator[dict[str, Any]]:
    first = {size: _both(model, whole, "sgd", size) for size in held_out}
    for arm in whole.arms:
        for size in held_out:
            truth = arm.worlds[size].seconds
            seconds = model.predict(arm.name, size).seconds
            simple = _simple({one: arm.worlds[one].seconds for one in known}, size)
            extra = math.nan
            if arm.config is not None:
                plain, plain_predicted = first[size]
                extra = (seconds.central - plain_predicted) / (truth - plain) - 1
            yield {
                "case": name, "arm": arm.name, "known": " ".join(map(str, known)), "world_size": size,
                "measured_ms": 1e3 * truth, "predicted_ms": 1e3 * seconds.central,
                "low_ms": 1e3 * seconds.low, "high_ms": 1e3 * seconds.high,
                "covered": seconds.low <= truth <= seconds.high, "error": seconds.central / truth - 1,
                "extra_error": extra, **{key: value / truth - 1 for key, value in simple.items()},
            }  # fmt: skip


def _both(model: StudyModel, whole: Measured, name: str, size: int) -> tuple[float, float]:
    """Measured and predicted seconds a step of one arm."""
    truth = next(arm for arm in whole.arms if arm.name == name).worlds[size].seconds
    return truth, model.predict(name, size).seconds.central


def _simple(known: Mapping[int, float], size: int) -> dict[str, float]:
    """Simpler models; one world alone can only be repeated."""
    if len(known) == 1:
        return {name: next(iter(known.values())) if name == "constant" else math.nan for name in BASELINES}
    return baselines(known, size)
