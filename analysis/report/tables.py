"""Tables of the report: its numbers as text ready to print, linked to runs, instrument and environment."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from analysis.comparisons import Comparison, points
from analysis.completeness import LeftOut
from analysis.metrics import IDENTITY, aggregated, in_order, time_to_accuracy
from analysis.records.study import Study
from analysis.report.answers import duration
from analysis.results import Place, Point, results
from analysis.rules import SCORINGS
from analysis.statistics.intervals import Interval, level
from analysis.steps import (
    kfac_bytes,
    peak_bytes,
    phase_costs,
    run_speeds,
)
from analysis.tuning import by_method, has_trials, trials

COLUMNS = [
    "arm", "world_size", "runs", "reached", "median_seconds", "speedup", "fewer_epochs", "cheaper_epochs",
    "verdict", "holm_p", "epochs", "seconds_per_epoch", "method",
]  # fmt: skip


def summary_table(study: Study) -> pd.DataFrame:
    """One row per arm and world size with scored runs; text columns are ready to print.

    Columns: `arm`, `world_size` (`*`: more ranks than CPUs), `runs`, `reached`, `median_seconds` to the
    target, `speedup` over the first-order arm at the same world size, with its interval if one is
    justified, and its two factors `fewer_epochs` and `cheaper_epochs`; `verdict` and `holm_p` (see
    `Comparison`); `epochs` to the target and `seconds_per_epoch` (medians), `method` of the speed-up's
    interval. If runs are left out, also `left_out`, such as `5 of 9`, with `!` where the number needs care.
    """
    shown = results(study)
    against, base, left_out = shown.comparisons, shown.baselines, shown.left_out
    rows = []
    for arm, size, runs in points(shown.scored):
        rows.append(
            {
                "arm": arm,
                "world_size": f"{size}*" if runs["oversubscribed"].any() else str(size),
                "runs": len(runs),
                "left_out": _left_out(left_out, arm, base.get(arm), size),
                "reached": int(runs["reached"].sum()),
                "median_seconds": spell(level(runs["scored_seconds"].tolist())),
                "epochs": _number(level(runs["scored_epochs"].tolist()).estimate),
                "seconds_per_epoch": _number(level(runs["seconds_per_epoch"].dropna().tolist()).estimate),
                **_compared(against.get((arm, size)), "base" if base.get(arm) == arm else "–"),
            }
        )
    columns = [*COLUMNS[:3], "left_out", *COLUMNS[3:]] if left_out else COLUMNS
    return pd.DataFrame(rows, columns=columns)


def _left_out(left_out: LeftOut, arm: str, baseline: str | None, size: int) -> str:
    marked = left_out.caution(arm, baseline, size)
    return (left_out.at(arm, size) or "0") + (" !" if marked else "")


def _compared(one: Comparison | None, otherwise: str) -> dict[str, str]:
    if one is None:
        lacking = dict.fromkeys(("fewer_epochs", "cheaper_epochs", "verdict", "holm_p"), otherwise)
        return {"speedup": otherwise, **lacking, "method": ""}
    return {
        "speedup": spell_ratio(one.speedup),
        "fewer_epochs": spell_ratio(one.fewer_epochs),
        "cheaper_epochs": spell_ratio(one.cheaper_epochs),
        "verdict": one.verdict,
        "holm_p": "–" if one.holm_p is None else f"{one.holm_p:.2g}",
        "method": one.speedup.method,
    }


def spell(interval: Interval) -> str:
    """`12.3 [10.1, 15.0]`; without an interval the estimate alone."""
    return _number(interval.estimate) + _limits(interval)


def spell_ratio(interval: Interval) -> str:
    """`1.2× [1.1, 1.3]`; where one arm's median run missed, `–` and the limits that ranks give, if any."""
    if interval.is_ratio:
        return f"{_number(interval.estimate)}×{_limits(interval)}"
    return f"–{_limits(interval)}"


def _limits(interval: Interval) -> str:
    if interval.low is None or interval.high is None or math.isinf(interval.low) or interval.high == 0:
        return ""  # misses left nothing known
    high = "∞)" if math.isinf(interval.high) else f"{_number(interval.high)}]"
    return f" [{_number(interval.low)}, {high}"


def _number(value: float) -> str:
    if math.isnan(value):
        return "–"
    return "not reached" if math.isinf(value) else f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


METRIC_COLUMNS = ["arm", "world_size", "metric", "runs", "last", "at_target"]


def metrics_table(study: Study) -> pd.DataFrame:
    """What the evaluations measured, a row per arm, world size and metric; empty if only the target's.

    Columns: `last`, at the last evaluation, and `at_target`, at the one that reached the target, of the runs
    that did: medians over completed runs with their intervals, as text ready to print.
    """
    metrics = study.metrics
    if metrics["is_target"].all():
        return pd.DataFrame(columns=METRIC_COLUMNS)
    scored = time_to_accuracy(study)
    last = metrics.drop_duplicates(["run", "metric"], keep="last")
    reached = scored[scored["reached"]][["run", "epochs"]].rename(columns={"epochs": "epoch"})
    crossing = metrics.merge(reached, on=["run", "epoch"])
    rows = []
    for arm, size, runs in points(scored):
        star = "*" if runs["oversubscribed"].any() else ""
        own, hit = (one[one["run"].isin(runs["run"])] for one in (last, crossing))
        for metric, values in own.groupby("metric", sort=False)["value"]:
            at_target = hit[hit["metric"] == metric]["value"]
            rows.append(
                {
                    "arm": arm, "world_size": f"{size}{star}", "metric": metric, "runs": len(values),
                    "last": _level(values), "at_target": _level(at_target),
                }
            )  # fmt: skip
    return pd.DataFrame(rows, columns=METRIC_COLUMNS)


def _level(values: pd.Series) -> str:
    known = values.dropna().tolist()
    return spell(level(known)) if known else "–"


def rules_table(study: Study) -> pd.DataFrame:
    """The same runs under every rule: seconds to the target per arm and world size, a column per rule."""
    tables = []
    for name, scoring in SCORINGS.items():
        scored = aggregated(replace(study, scoring=scoring))
        if scoring.pools_arms:
            scored["arm"] = [
                _pooled(study, method, setting)
                for method, setting in zip(scored["method"], scored["setting"], strict=True)
            ]
        tables.append(scored.assign(rule=name)[["arm", "world_size", "rule", "seconds"]])
    table = pd.concat(tables, ignore_index=True)
    if table.empty:
        return pd.DataFrame(columns=["arm", "world_size", *SCORINGS])
    table["place"] = table["arm"].map({arm: n for n, arm in enumerate(dict.fromkeys(table["arm"]))})
    wide = table.pivot_table(
        index=["place", "arm", "world_size"], columns="rule", values="seconds", dropna=False, observed=True
    )
    wide = wide.reindex(columns=list(SCORINGS)).dropna(how="all").reset_index().drop(columns="place")
    for name in SCORINGS:
        wide[name] = [_number(value) for value in wide[name]]
    crowded = set(study.cells[study.cells["oversubscribed"]]["world_size"])
    wide["world_size"] = [f"{size}*" if size in crowded else str(size) for size in wide["world_size"]]
    return wide


def _pooled(study: Study, method: str, setting: str) -> str:
    """The name of a method's only arm in a setting, or a name for all of them together."""
    cells = study.cells
    arms = cells[(cells["method"] == method) & (cells["setting"] == setting)]["arm"].unique()
    return str(arms[0]) if len(arms) == 1 else f"{method} {setting} (best of {len(arms)} arms per seed)"


def costs_table(study: Study) -> pd.DataFrame:
    """Time, traffic and memory of a step, per arm and world size: medians, as text ready to print."""
    names = ["step_ms", *STAGES, "sent_kb", "kfac_mb", "peak_mb"]
    costs = phase_costs(study)
    if costs.empty:
        return pd.DataFrame(columns=["arm", "world_size", "runs", *names])
    runs = study.cells[IDENTITY].merge(run_speeds(study), on="run")
    for stage in STAGES:
        of_stage = costs[costs["phase"].isin(STAGES[stage])]
        runs[stage] = runs["run"].map(of_stage.groupby("run")["seconds_per_step"].sum()).fillna(0) * 1e3
    sent = costs.groupby("run")["bytes_per_step"].sum()
    runs["sent_kb"] = runs["run"].map(sent) / 1e3
    runs = runs.merge(kfac_bytes(study), on="run", how="left").merge(peak_bytes(study), on="run", how="left")
    runs["step_ms"] = runs["seconds_per_step"] * 1e3
    runs["kfac_mb"], runs["peak_mb"] = runs["kfac_bytes"].fillna(0) / 1e6, runs["peak_bytes"] / 1e6
    rows = []
    for arm, size, group in points(in_order(study, runs)):
        star = "*" if group["oversubscribed"].any() else ""
        medians = {name: _number(float(group[name].median())) for name in names}
        rows.append({"arm": arm, "world_size": f"{size}{star}", "runs": len(group), **medians})
    return pd.DataFrame(rows, columns=["arm", "world_size", "runs", *names])


STAGES = {
    "model_ms": ("forward", "backward"),
    "gradient_comm_ms": ("gradient_comm",),
    "factor_ms": ("factor_compute",),
    "factor_comm_ms": ("factor_comm",),
    "inverse_ms": ("inverse_compute",),
    "inverse_comm_ms": ("inverse_comm",),
    "precondition_ms": ("precondition", "scale"),
    "precondition_comm_ms": ("precondition_comm",),
}
"""Columns of `costs_table`: milliseconds per step on the slowest rank, amortised."""


def shortlist(places: Sequence[Place], rows: int = 5) -> list[Point]:
    """The fastest points of all world sizes by time, and the fastest first-order one.

    Of a study of several settings, whose times do not compare, the fastest of each setting with the fastest
    of its first-order arm and of its others. Points that are not judged only where no point is.
    """
    judged = [place for place in places if place.judged]
    every = [point for place in judged or places for point in place.points if math.isfinite(point.seconds)]
    if not any(point.is_baseline for point in every):  # it missed: its row says so
        every += [place.baseline for place in judged if place.baseline is not None]
    by_time = sorted(every, key=lambda one: (one.seconds, one.arm, one.world_size))
    settings = dict.fromkeys(point.setting for point in by_time)
    if len(settings) > 1:
        best = [point for setting in sorted(settings) for point in _best(by_time, setting)]
        return best[: 3 * rows]
    first = next((point for point in by_time if point.is_baseline), None)
    chosen = by_time[:rows]
    if first is not None and first not in chosen:
        chosen = [*by_time[: rows - 1], first]
    return chosen


def _best(by_time: Sequence[Point], setting: str) -> list[Point]:
    own = [point for point in by_time if point.setting == setting]
    first = [point for point in own if point.is_baseline][:1]
    others = [point for point in own if not point.is_baseline][:1]
    return list(dict.fromkeys([own[0], *others, *first]))


def fastest_table(points: Sequence[Point]) -> list[dict[str, Any]]:
    """The fastest points of a study as text, one row each."""
    return [
        {
            "arm": point.arm,
            "world_size": f"{point.world_size}{'*' if point.oversubscribed else ''}",
            "seconds": duration(point.seconds),
            "reached": f"{point.reached} of {point.runs}",
            "epochs": f"{point.epochs:.3g}" if math.isfinite(point.epochs) else "–",
            "seconds_per_epoch": duration(point.seconds_per_epoch),
            "speedup": "base" if point.is_baseline else "–" if point.against is None
            else spell_ratio(point.against.speedup),
            "verdict": "–" if point.against is None else point.against.verdict,
        }
        for point in points
    ]  # fmt: skip


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
        shown[name] = [_trial_number(value, "missed") for value in methods[name]]
    shown["regret"] = [
        "–" if math.isnan(value) else "misses" if math.isinf(value) else f"{value:.2f}×"
        for value in methods["regret"]
    ]
    shown["spent_minutes"] = [_trial_number(value / 60) for value in methods["spent_seconds"]]
    return shown[METHOD_COLUMNS]


def trials_table(study: Study) -> pd.DataFrame:
    """Every trial with its setting as text."""
    table = trials(study)
    fields = [name for name in table.columns if "." in name]
    shown = table[["method"]].astype("str")
    shown["trial"] = [str(number) for number in table["trial"]]
    shown["place"] = [str(place) for place in table["place"]]
    shown["median_seconds"] = [
        _trial_number(value, "missed") if state == "COMPLETED" else state
        for value, state in zip(table["median_seconds"], table["state"], strict=True)
    ]
    shown["median_epochs"] = [_trial_number(value, "missed") for value in table["median_epochs"]]
    shown["best_value"] = [_trial_number(value) for value in table["best_value"]]
    shown["setting"] = [
        ", ".join(f"{name.rpartition('.')[2]}={row[name]}" for name in fields if not _is_missing(row[name]))
        for row in table.to_dict("records")
    ]
    return shown[TRIAL_COLUMNS]


def _trial_number(value: float, infinite: str = "∞") -> str:
    if math.isnan(value):
        return "–"
    return infinite if math.isinf(value) else f"{value:.4g}"


def _is_missing(value: object) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows as mappings, for the template."""
    return [{str(key): value for key, value in row.items()} for row in frame.to_dict("records")]
