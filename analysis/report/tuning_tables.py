"""Tables of the report about trials: how a method's came out, and every one of them."""

from __future__ import annotations

import math

import pandas as pd

from analysis.records.study import Study
from analysis.tuning import by_method, has_trials, trials

METHOD_COLUMNS = [
    "method", "trials", "reached", "best_seconds", "median_seconds", "worst_seconds", "regret",
    "spent_minutes",
]  # fmt: skip
TRIAL_COLUMNS = ["method", "trial", "place", "median_seconds", "median_epochs", "best_value", "setting"]


def tuning_tables(study: Study) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Methods and trials as text ready to print; both empty if the study has no trials."""
    if not has_trials(study):
        return pd.DataFrame(columns=METHOD_COLUMNS), pd.DataFrame(columns=TRIAL_COLUMNS)
    return tuning_table(by_method(study)), trials_table(study)


def tuning_table(methods: pd.DataFrame) -> pd.DataFrame:
    """The rows of `by_method` as text: how many trials reached, their spread, the regret."""
    shown = pd.DataFrame({"method": methods["method"]})
    shown["trials"] = [str(count) for count in methods["trials"]]
    shown["reached"] = [
        f"{got} of {count}" for got, count in zip(methods["reached"], methods["trials"], strict=True)
    ]
    for name in ("best_seconds", "median_seconds", "worst_seconds"):
        shown[name] = [_number(value, "missed") for value in methods[name]]
    shown["regret"] = [
        "–" if math.isnan(value) else "misses" if math.isinf(value) else f"{value:.2f}×"
        for value in methods["regret"]
    ]
    shown["spent_minutes"] = [_number(value / 60) for value in methods["spent_seconds"]]
    return shown[METHOD_COLUMNS]


def trials_table(study: Study) -> pd.DataFrame:
    """Every trial with its setting as text."""
    table = trials(study)
    fields = [name for name in table.columns if "." in name]
    shown = table[["method"]].astype("str")
    shown["trial"] = [str(number) for number in table["trial"]]
    shown["place"] = [str(place) for place in table["place"]]
    shown["median_seconds"] = [
        _number(value, "missed") if state == "COMPLETED" else state
        for value, state in zip(table["median_seconds"], table["state"], strict=True)
    ]
    shown["median_epochs"] = [_number(value, "missed") for value in table["median_epochs"]]
    shown["best_value"] = [_number(value) for value in table["best_value"]]
    shown["setting"] = [
        ", ".join(f"{name.rpartition('.')[2]}={row[name]}" for name in fields if not _is_missing(row[name]))
        for row in table.to_dict("records")
    ]
    return shown[TRIAL_COLUMNS]


def _number(value: float, infinite: str = "∞") -> str:
    if math.isnan(value):
        return "–"
    return infinite if math.isinf(value) else f"{value:.4g}"


def _is_missing(value: object) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))
