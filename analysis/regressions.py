"""Changes between two sets of results for the same cells, and which of them are regressions."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import pandas as pd

from analysis.metrics import time_to_accuracy
from analysis.records.study import Study
from analysis.statistics.intervals import Interval, holm, ratio
from analysis.statistics.power import FEWEST_RUNS, SIGNIFICANT
from analysis.steps import kfac_bytes, peak_bytes, run_speeds

NOT_COMPARED = {"run", "method", "seed"}
"""Columns of `Study.fields` that may differ between runs of the same point."""


@dataclass(frozen=True)
class Change:
    """One quantity of one arm on one world size, after over before; smaller is better for all quantities.

    Attributes:
        least: the smallest change that matters, as a share.
        holm_p: p of `ratio`, adjusted for all comparisons of the two sets.
    """

    arm: str
    world_size: int
    quantity: str
    ratio: Interval
    least: float
    holm_p: float | None = None

    @property
    def verdict(self) -> str:
        """`regression` or `improvement` if effect, interval and p agree; else `same` or `undecided`."""
        if self.ratio.low is None or self.ratio.high is None:
            return "undecided"
        if self.holm_p is not None and self.holm_p < SIGNIFICANT and self.ratio.excludes(1):
            if self.ratio.estimate >= 1 + self.least:
                return "regression"
            if self.ratio.estimate <= 1 / (1 + self.least):
                return "improvement"
        within = 1 / (1 + self.least) <= self.ratio.low and self.ratio.high <= 1 + self.least
        return "same" if within else "undecided"


def changes(before: Study, after: Study, least: float) -> list[Change]:
    """Every quantity of every point that both have, in the order of `after`; Holm over all of them."""
    old, new = _points(before), _points(after)
    found = []
    for key, arm in dict(zip(_keys(after), after.cells["arm"], strict=True)).items():
        if key not in old or key not in new:
            continue
        size = int(json.loads(key)["world_size"])
        for quantity in QUANTITIES:
            pair = [side[key][quantity].dropna().tolist() for side in (new, old)]
            if all(pair) and not all(value == 0 for side in pair for value in side):
                interval = ratio(*pair, counted=quantity in COUNTED)
                found.append(Change(arm, size, quantity, interval, least))
    tested = [place for place, change in enumerate(found) if _is_tested(change)]
    for place, p in zip(tested, holm([found[place].ratio.p_value or 0.0 for place in tested]), strict=True):
        found[place] = replace(found[place], holm_p=p)
    return found


def _is_tested(change: Change) -> bool:
    enough = change.ratio.n >= FEWEST_RUNS or change.quantity in COUNTED
    return enough and change.ratio.p_value is not None


def differing_environments(before: Study, after: Study) -> list[str]:
    """`cpu: X, then Y` for every key whose values differ: these too may have caused a change."""
    values: list[dict[str, tuple[str, ...]]] = [
        {str(key): tuple(sorted(set(rows["value"]))) for key, rows in study.environments.groupby("key")}
        for study in (before, after)
    ]
    keys = sorted({*values[0], *values[1]})
    texts = [{key: " | ".join(side.get(key, ("nothing",))) for key in keys} for side in values]
    return [f"{key}: {texts[0][key]}, then {texts[1][key]}" for key in keys if texts[0][key] != texts[1][key]]


def _points(study: Study) -> dict[str, pd.DataFrame]:
    """Runs by all fields that determine their numbers, except the seed."""
    runs = pd.DataFrame({"run": study.cells["run"], "key": _keys(study)})
    for quantity, measure in QUANTITIES.items():
        values = measure(study)
        runs[quantity] = runs["run"].map(values)
    return {str(key): group for key, group in runs.groupby("key", sort=False)}


def _keys(study: Study) -> list[str]:
    rows = study.fields.drop(columns=[name for name in NOT_COMPARED if name in study.fields]).to_dict(
        "records"
    )
    known = dict(zip(study.fields["run"], rows, strict=True))
    return [json.dumps(_plain(known[run]), sort_keys=True, default=str) for run in study.cells["run"]]


def _plain(row: Mapping[Any, Any]) -> dict[str, Any]:
    return {str(key): value for key, value in row.items() if value is not None}


QUANTITIES: Mapping[str, Callable[[Study], pd.Series]] = MappingProxyType(
    {
        "seconds to target": lambda study: time_to_accuracy(study).set_index("run")["scored_seconds"],
        "epochs to target": lambda study: time_to_accuracy(study).set_index("run")["scored_epochs"],
        "seconds per step": lambda study: run_speeds(study).set_index("run")["seconds_per_step"],
        "peak bytes": lambda study: peak_bytes(study).set_index("run")["peak_bytes"].astype("float64"),
        "K-FAC bytes": lambda study: kfac_bytes(study).set_index("run")["kfac_bytes"],
    }
)
"""The compared quantities; smaller is better."""

COUNTED = {"K-FAC bytes"}
"""The quantities that are exact, without noise."""
