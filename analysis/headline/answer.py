"""The sentences at the head of the headline's page, each computed from the runs."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from analysis.headline.comparison import SETTING, Point, against, is_number
from analysis.records.study import Study
from analysis.report.study_facts import targets

_DATA = {"cifar10": "CIFAR-10 (JPEG copy)"}  # what the committed archives were run on
ANSWERS = ("headline-again", "headline")
"""The studies that may answer, the first of them that was run; docs/headline.md fixed it beforehand."""
_PAPERS_BASELINE = "sgd"
_CLAIM, _SECOND_CLAIM = 0.25, 0.18  # less time: the goal of the study, and SC20's abstract


def answer(table: pd.DataFrame, study: Study) -> str:
    """One sentence: does the chosen K-FAC arm reach the target sooner at the main point, and by how much?"""
    row = headline_row(table)
    if row is None:
        return "**Nothing is decided**: no point has both a K-FAC arm and a first-order arm."
    return _sentence(row, study)


def other_settings(table: pd.DataFrame, study: Study) -> list[str]:
    """The same sentences for every other point of the study, such as another batch size."""
    first = headline_row(table)
    if first is None:
        return []
    rows = [
        row
        for row in _records(table[~table["study"].isin(superseded(table))])
        if row["chosen"] and row["baseline"] and row["kfac"] and _point(row) != _point(first)
    ]
    return [" ".join([_sentence(row, study), *_over_papers_baseline(table, row, study)]) for row in rows]


def _sentence(row: dict[str, Any], study: Study) -> str:
    point = _point(row)
    data = _DATA.get(point.workload, point.workload)
    where = f"On {data} ({point.words}), K-FAC (`{row['arm']}`)"
    rival = f"the best tuned first-order method (`{row['baseline']}`)"
    goal = "; ".join(targets(study.only(study.cells["sweep"] == point.study)))
    speedup, low, high = row["speedup"], row["low"], row["high"]
    parts = _factors(row)
    if not math.isfinite(speedup) or speedup == 0:
        return f"**No result**: {where} or {rival} did not reach the target ({goal}) in its median run."
    saved, limits = _saved(speedup), _saved_limits(low, high)
    than = f"than {rival}"
    if low is not None and low > 1:
        less = f"{saved:.0%} less time {limits}"
        return f"**Yes**: {where} reaches the target ({goal}) in {less} {than}; {parts}."
    if low is not None and high is not None and high < 1:
        more = f"(95 % interval: {-_saved(high):.0%} to {-_saved(low):.0%})"
        return f"**No**: {where} needs {-saved:.0%} more time {more} to the target ({goal}) {than}; {parts}."
    less = f"{abs(saved):.0%} {'less' if saved > 0 else 'more'} time {limits}"
    return (
        f"**Not shown**: {where} takes {less} to the target ({goal}) {than}, which these runs cannot tell "
        f"from no difference; {parts}."
    )


def papers_baseline(table: pd.DataFrame, study: Study) -> list[str]:
    """The chosen arm against SGD alone, where another first-order arm is the best."""
    row = headline_row(table)
    return [] if row is None else _over_papers_baseline(table, row, study)


def _over_papers_baseline(table: pd.DataFrame, row: dict[str, Any], study: Study) -> list[str]:
    if row["baseline"] == _PAPERS_BASELINE:
        return []
    found = against(study, _point(row), row["arm"], _PAPERS_BASELINE)
    if found is None:
        return []
    compare = f"Against `{_PAPERS_BASELINE}` alone, with which the papers compare"
    if not is_number(found.estimate) or not found.estimate:
        return [f"{compare}: no ratio, as a median run missed; {_reached(table, row)}."]
    saved = _saved(found.estimate)
    return [
        f"{compare}: {abs(saved):.0%} {'less' if saved > 0 else 'more'} time "
        f"{_saved_limits(found.low, found.high)}."
    ]


def _reached(table: pd.DataFrame, row: dict[str, Any]) -> str:
    """How many runs of the row's arm and of the papers' baseline reached the target at the row's point."""
    arms = [row["arm"], _PAPERS_BASELINE]
    found = [one for one in _records(table) if _point(one) == _point(row) and one["arm"] in arms]
    counts = [f"`{one['arm']}` in {one['reached']} of {one['runs']}" for one in found]
    return f"runs that reached it: {', '.join(counts)}"


def _point(row: dict[str, Any]) -> Point:
    return Point(row["study"], row["workload"], *(row[name] for name in SETTING))


def superseded(table: pd.DataFrame) -> list[str]:
    """Names of studies that a later one of `ANSWERS` replaces."""
    return [name for name in ANSWERS if name in set(table["study"])][1:]


def goals(table: pd.DataFrame) -> list[str]:
    """What the study set out to show, and whether it did; else the point that is nearest to it.

    A point of too few runs for an interval is not named: one run may be near by accident.
    """
    table = table[~table["study"].isin(superseded(table))]
    rows = table[table["kfac"] & table["speedup"].map(is_number) & table["low"].map(is_number)]
    shown = [row for row in _records(rows) if row["low"] is not None and row["low"] > 1]
    goal = [row for row in shown if _saved(row["speedup"]) >= _CLAIM]
    second = [row for row in shown if _saved(row["speedup"]) >= _SECOND_CLAIM]
    settings = {tuple(row[name] for name in SETTING) for row in second}
    first, other = (
        "shown" if done else "not shown" for done in (bool(goal), bool(goal) and len(settings) > 1)
    )
    met = (
        f"Goals: at least {_CLAIM:.0%} less time in one setting, with the interval above zero: {first}; "
        f"SC20's {_SECOND_CLAIM:.0%} in a second: {other}."
    )
    if goal or rows.empty:
        return [met]
    near = max(_records(rows), key=lambda row: (row["speedup"], row["arm"]))
    point = _point(near)
    return [
        f"{met} The nearest is `{near['arm']}` ({point.words}): a speed-up of {near['speedup']:.2f}; "
        f"{_factors(near)}."
    ]


def _factors(row: dict[str, Any]) -> str:
    epochs, cost = row["fewer_epochs"], row["cost_ratio"]
    if not is_number(epochs) or not is_number(cost) or not epochs:
        return "its epochs cannot be compared"
    return (
        f"it needs {1 / epochs:.2f} times the epochs, each takes {cost:.2f} times as long; it would "
        f"break even at {epochs:.2f} times"
    )


def headline_row(table: pd.DataFrame) -> dict[str, Any] | None:
    """The chosen arm of the study that answers, at the point with most arms and on most ranks."""
    rows = [row for row in _records(table) if row["chosen"] and row["baseline"] and row["kfac"]]
    answers = next((name for name in ANSWERS if any(row["study"] == name for row in rows)), None)
    rows = [row for row in rows if answers is None or row["study"] == answers]
    sizes = table.groupby(SETTING)["arm"].nunique().to_dict()
    return max(
        rows, key=lambda row: (sizes[tuple(row[name] for name in SETTING)], row["ranks"]), default=None
    )


def _records(table: pd.DataFrame) -> list[dict[str, Any]]:
    return [{str(name): value for name, value in row.items()} for row in table.to_dict("records")]


def _saved(speedup: float) -> float:
    """Share of the time that is saved; negative if it takes longer."""
    return 1 - 1 / speedup


def _saved_limits(low: float | None, high: float | None) -> str:
    if low is None or high is None or not low > 0:
        return "(no interval: too few runs)"
    upper = (
        "100%, as a run that missed counts as infinitely slow" if math.isinf(high) else f"{_saved(high):.0%}"
    )
    return f"(95 % interval of the saving: {_saved(low):.0%} to {upper})"
