"""Rules of time to accuracy on simulated learning curves, scored by `analysis.metrics`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd

from analysis.comparisons import Comparison, compared, judged, points
from analysis.metrics import time_to_accuracy
from analysis.records.study import FRAMES, Study
from analysis.rules import SCORINGS, Rule, Scoring
from analysis.statistics.reference_points import reference_point
from jobs.experiments.coverage.simulation import EFFECTS, Counts, Result, generator
from jobs.experiments.coverage.studies import Array

EPOCHS = 20
TARGET = 0.95
ARMS = ("sgd", "comm_opt")


def scores_of(rule: str, runs: int, _: np.random.Generator, studies: int, stops: bool = False) -> Result:
    """Simulate studies in blocks whose runs are scored by a rule from their evaluations.

    Accuracy is 1 - exp(-epoch / tau) / 2 with 0.4 % of noise, and is evaluated after each epoch; tau scatters
    by 10 %, the seconds of an epoch by 5 % and by 20 % between blocks. A twentieth of a second goes to every
    evaluation. All rules score the same runs.

    Args:
        rule: a key of `analysis.rules.SCORINGS`.
        runs: of each of two arms.
        _: of the row, not used.
        studies: number of simulated ones.
        stops: whether runs end when they first reach the target.
    """
    found = _scored(SCORINGS[rule].rule, SCORINGS[rule].clock, runs, studies, stops)
    counted = Counts()
    logs = []
    for study in range(1, studies + 1):
        both = [found.get((study, arm)) for arm in ARMS]
        base, arm = (None if one is None else _columns(one) for one in both)
        if base is None or arm is None or both[0] is None or both[1] is None:
            logs.append(math.nan)
            continue
        scores = [SCORINGS[rule].aggregate(one) for one in both if one is not None]
        logs.append(math.log(scores[0] / scores[1]) if all(map(math.isfinite, scores)) else math.nan)
        for place, effect in enumerate(EFFECTS):
            faster = {**arm, "scored_seconds": [one / effect for one in arm["scored_seconds"]]}
            speedup = compared(base, faster, "scored_seconds")
            counted.add(place, judged({1: Comparison("arm", "base", 1, speedup, speedup, speedup)}))
    known = np.abs(np.array(logs)[~np.isnan(logs)])
    spread = math.exp(float(np.quantile(known, 0.95))) if len(known) else math.nan
    return replace(counted.result(studies), score_95=spread, unscored=1 - len(known) / studies)


def reference_points_of(runs: int, rng: np.random.Generator, studies: int) -> Result:
    """Simulate MLPerf's test that a submission of so many runs converges no faster than its reference.

    A claim is a rejection. Epochs are whole and scatter by 5 %; the reference has twice the runs, and the
    submission needs as many epochs, or 1.1 or 1.25 times fewer.
    """
    rejected = []
    for effect in EFFECTS:
        reference = np.round(40 * np.exp(rng.normal(0, 0.05, (studies, 2 * runs))))
        own = np.round(40 / effect * np.exp(rng.normal(0, 0.05, (studies, runs))))
        pairs = zip(reference.tolist(), own.tolist(), strict=True)
        failed = [reference_point(one, runs).factor(other) is None for one, other in pairs]
        rejected.append(sum(failed) / studies)
    method = "one-sided t test at 5 % of trimmed means"
    return Result(method, false_claims=rejected[0], power_10=rejected[1], power_25=rejected[2])


@lru_cache
def _scored(
    rule: Rule, clock: str, runs: int, studies: int, stops: bool
) -> dict[tuple[int, str], pd.DataFrame]:
    """The scored runs by study and arm."""
    simulated = _study(generator(f"curves; {runs} runs; {stops}"), studies, runs, stops)
    scoring = Scoring("simulated", rule=rule, clock=clock)
    scored = time_to_accuracy(replace(simulated, scoring=scoring))
    return {(size, arm): group for arm, size, group in points(scored)}


def _columns(runs: pd.DataFrame) -> Mapping[str, list[Any]]:
    return {name: runs[name].tolist() for name in ("scored_seconds", "block")}


def _study(rng: np.random.Generator, studies: int, runs: int, stops: bool) -> Study:
    """All studies as one, each under a world size of its own."""
    shape = (studies, len(ARMS), runs)
    epoch = np.arange(1, EPOCHS + 1)
    tau = 4 * np.exp(rng.normal(0, 0.1, shape))
    accuracy = 1 - np.exp(-epoch / tau[..., None]) / 2 + rng.normal(0, 0.004, (*shape, EPOCHS))
    seconds = np.exp(rng.normal(0, 0.05, shape) + rng.normal(0, 0.2, (studies, 1, runs)))
    cells = pd.DataFrame(
        [
            {"run": f"{study}-{arm}-{run}", "arm": arm, "method": arm, "world_size": study, "seed": run,
             "block": f"seed {run}"}
            for study in range(1, studies + 1) for arm in ARMS for run in range(runs)
        ]
    ).assign(
        setting="", state="COMPLETED", oversubscribed=False, valid=True, stop_reason="epochs",
        target_metric="accuracy", target_value=TARGET, target_direction="higher",
        strategy=None, train_seconds=0.0,
    )  # fmt: skip
    evaluations = _evaluations(cells["run"], epoch, accuracy, seconds)
    if stops:
        reached = evaluations["value"] >= TARGET
        before = reached.groupby(evaluations["run"], sort=False).cumsum() - reached
        at_target = set(evaluations["run"][reached])
        evaluations = evaluations[before == 0]
        cells["stop_reason"] = np.where(cells["run"].isin(at_target), "target", "epochs")
    nothing = {name: pd.DataFrame({"run": []}) for name in (*FRAMES, "fields") if name != "evaluations"}
    return Study(cells=cells, evaluations=evaluations, **nothing)


def _evaluations(names: pd.Series, epoch: Array, accuracy: Array, seconds: Array) -> pd.DataFrame:
    train = (seconds[..., None] * epoch).reshape(-1)
    number = np.tile(epoch, len(names))
    return pd.DataFrame(
        {
            "run": np.repeat(names.to_numpy(), EPOCHS), "metric": "accuracy", "value": accuracy.reshape(-1),
            "step": number, "epoch": number.astype(float), "train_seconds": train,
            "eval_seconds": 0.04 * number, "wall_seconds": train + 0.05 * number,
        }
    )  # fmt: skip
