"""The page of the headline, its CSV files and its figure, from archives of the study."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.figures.drawing import sentence
from analysis.figures.files import save
from analysis.headline.comparison import Point, scores, speedups, tunings
from analysis.headline.figure import draw
from analysis.metrics import time_to_accuracy
from analysis.records.study import Study
from analysis.report.findings import cautions
from analysis.report.markup import to_markdown
from analysis.report.tables import targets
from analysis.report.tuning_tables import tuning_tables
from analysis.rules import SCORINGS, median_score
from analysis.tuning import trials

FILES = ("speedup.csv", "runs.csv", "trials.csv", "rules.csv")
FIGURE = "headline"
_DATA = {"cifar10": "CIFAR-10 (JPEG copy)"}  # what the committed archives were run on
PILOT = "-pilot"
"""In the names of sweeps that only set a target; nothing here is computed from them."""
ANSWERS = ("headline-again", "headline")
"""The studies that may answer, the first of them that was run; docs/headline.md fixed it beforehand."""
_CLAIM, _SECOND_CLAIM = 0.25, 0.18  # less time: the goal of the study, and SC20's abstract

NOT_RUN = (
    "**The study has not been run yet**: no archive of it is committed here, so nothing on this page says "
    "whether K-FAC reaches the target sooner than a well-tuned first-order method."
)


def write_headline(study: Study | None, out: Path, archives: Sequence[str] = ()) -> Path:
    """Write `README.md`, `speedup.csv`, `runs.csv`, `trials.csv`, `rules.csv` and the figure.

    Args:
        study: all archives together; None if there are none.
        out: folder; files of an earlier call are replaced.
        archives: names of the archives, for the page.

    Returns:
        The path of the page.
    """
    out.mkdir(parents=True, exist_ok=True)
    page = out / "README.md"
    if study is not None:
        of_pilot = study.cells["sweep"].str.contains(PILOT, regex=False)
        study = study.of_cells(set(study.cells.loc[~of_pilot, "cell"]))
    table = speedups(study) if study is not None else pd.DataFrame()
    if study is None or table.empty:
        for name in (*FILES, *(f"{FIGURE}.{kind}" for kind in ("png", "pdf", "csv"))):
            (out / name).unlink(missing_ok=True)
        text = [NOT_RUN]
        if study is not None:
            text.append(
                f"Beside the pilot there are {len(study.cells)} runs of trials, none of the study itself."
            )
            text += _tuning(study, out)
        page.write_text(_page(text), encoding="utf-8")
        return page
    table.to_csv(out / "speedup.csv", index=False, lineterminator="\n")
    _runs(study).to_csv(out / "runs.csv", index=False, lineterminator="\n")
    rules = _by_rule(study)
    rules.to_csv(out / "rules.csv", index=False, lineterminator="\n")
    row = _headline_row(table)
    caption = _caption(study, table)
    save(draw(table, caption, row["study"] if row else ""), out, FIGURE)
    text = [
        answer(table, study),
        *_goals(table),
        f"![Speed-ups over the best first-order arm]({FIGURE}.png)",
        f"*{caption}*",
        "## Every comparison\n\n" + to_markdown(_shown(table)),
        f"## The same runs under every rule\n\n{_rules_said(rules)}\n\n{to_markdown(rules)}",
        *_tuning(study, out),
        "## Cautions\n\n" + "\n".join(f"- {line}" for line in cautions(_without_trials(study))),
        "Archives: " + ", ".join(f"`{name}`" for name in archives) + ".",
    ]
    page.write_text(_page(text), encoding="utf-8")
    return page


def answer(table: pd.DataFrame, study: Study) -> str:
    """One sentence: does the chosen K-FAC arm reach the target sooner at the main point, and by how much?"""
    row = _headline_row(table)
    if row is None:
        return "**Nothing is decided**: no point has both a K-FAC arm and a first-order arm."
    point = Point(row["study"], row["workload"], row["model"], row["batch"], row["ranks"])
    data = _DATA.get(point.workload, point.workload)
    where = f"On {data} ({point.words}), K-FAC (`{row['arm']}`)"
    against = f"the best tuned first-order method (`{row['baseline']}`)"
    goal = "; ".join(targets(study))
    speedup, low, high = row["speedup"], row["low"], row["high"]
    parts = _factors(row)
    if not math.isfinite(speedup) or speedup == 0:
        return f"**No result**: {where} or {against} did not reach the target ({goal}) in its typical run."
    saved, limits = _saved(speedup), _saved_limits(low, high)
    than = f"than {against}"
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


def _goals(table: pd.DataFrame) -> list[str]:
    """What the study set out to show, and whether it did; else the point that is nearest to it."""
    rows = table[table["kfac"] & table["speedup"].map(_is_number)]
    shown = [row for row in _records(rows) if row["low"] is not None and row["low"] > 1]
    goal = [row for row in shown if _saved(row["speedup"]) >= _CLAIM]
    second = [row for row in shown if _saved(row["speedup"]) >= _SECOND_CLAIM]
    settings = {(row["model"], row["batch"], row["ranks"]) for row in second}
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
    point = Point(near["study"], near["workload"], near["model"], near["batch"], near["ranks"])
    return [
        f"{met} The nearest is `{near['arm']}` ({point.words}): a speed-up of {near['speedup']:.2f}; "
        f"{_factors(near)}."
    ]


def _factors(row: dict[str, Any]) -> str:
    epochs, cost = row["fewer_epochs"], row["cost_ratio"]
    if not _is_number(epochs) or not _is_number(cost) or not epochs:
        return "its epochs cannot be compared"
    return (
        f"it needs {1 / epochs:.2f} times the epochs, each takes {cost:.2f} times as long, and "
        f"{epochs:.2f} times would break even"
    )


def _headline_row(table: pd.DataFrame) -> dict[str, Any] | None:
    """The chosen arm of the study that answers, at the point with most arms and on most ranks."""
    rows = [row for row in _records(table) if row["chosen"] and row["baseline"] and row["kfac"]]
    answers = next((name for name in ANSWERS if any(row["study"] == name for row in rows)), None)
    rows = [row for row in rows if answers is None or row["study"] == answers]
    sizes = table.groupby(["model", "batch", "ranks"])["arm"].nunique().to_dict()
    return max(
        rows, key=lambda row: (sizes[row["model"], row["batch"], row["ranks"]], row["ranks"]), default=None
    )


def _by_rule(study: Study) -> pd.DataFrame:
    """The speed-up of the chosen arm under every rule of time to accuracy that can score these runs."""
    own = speedups(study)
    point = ["study", "model", "batch", "ranks", "arm"]
    chosen = own[own["chosen"]][point]
    tables = []
    for name, scoring in SCORINGS.items():
        ruled = replace(study, scoring=scoring)
        table = (speedups if scoring.aggregate is median_score else scores)(ruled).merge(chosen, on=point)
        table = table.assign(rule=name, about=f"{scoring.title}: {scoring.about}")
        for limit in ("speedup", "low", "high"):
            table[limit] = [_number(value) for value in table[limit]]
        tables.append(table[["rule", "about", *point, "baseline", "speedup", "low", "high"]])
    return pd.concat(tables, ignore_index=True)


def _rules_said(rules: pd.DataFrame) -> str:
    left_out = [name for name in SCORINGS if name not in set(rules["rule"])]
    said = (
        "Speed-up of the K-FAC arm chosen by the tuning over the best first-order arm of each rule. MLPerf's "
        "and AlgoPerf's rules make one number of all runs of an arm: a ratio without an interval."
    )
    if left_out:
        said += (
            f" Not scored: {', '.join(left_out)}, for runs that end at their first evaluation at the target."
        )
    return said


def _runs(study: Study) -> pd.DataFrame:
    scored = time_to_accuracy(study).merge(
        study.cells[["run", "sweep", "global_batch_size", "trial"]], on="run"
    )
    columns = [
        "run", "sweep", "arm", "method", "global_batch_size", "world_size", "seed", "block", "reached",
        "seconds", "epochs", "seconds_per_epoch",
    ]  # fmt: skip
    return scored[scored["trial"].isna()][columns]


def _tuning(study: Study, out: Path) -> list[str]:
    by_study = tunings(study)
    if not by_study:
        return []
    tables = [trials(own).assign(study=name) for name, own in by_study.items()]
    table = pd.concat(tables, ignore_index=True)
    table = table[["study", *(name for name in table.columns if name != "study")]]
    table.to_csv(out / "trials.csv", index=False, lineterminator="\n")
    text = [
        "## How each method was tuned\n\nEqual numbers of trials in a study; every trial is in `trials.csv`. "
        "Regret: the median trial's time over the best's."
    ]
    for name, own in by_study.items():
        methods, _ = tuning_tables(own)
        text.append(f"For `{name}`:\n\n{to_markdown(methods)}")
    return text


def _without_trials(study: Study) -> Study:
    return study.of_cells(set(study.cells.loc[study.cells["trial"].isna(), "cell"]))


def _shown(table: pd.DataFrame) -> pd.DataFrame:
    shown = table.drop(columns=["workload", "kfac"]).copy()
    for name in ("median_seconds", "speedup", "low", "high", "fewer_epochs", "cost_ratio"):
        shown[name] = [_number(value) for value in shown[name]]
    shown["chosen"] = ["yes" if chosen else "" for chosen in shown["chosen"]]
    return shown.astype("str").replace("nan", "–")


def _caption(study: Study, table: pd.DataFrame) -> str:
    several = table["study"].nunique() > 1
    goal = "; ".join(targets(study))
    return sentence(
        f"Left: how many times sooner than the best first-order arm each arm is at the target ({goal}),",
        "with 95 % limits; in brackets the runs that reached it.",
        "Right: the same as epochs saved against what an epoch costs; above the line an arm saves time.",
        "Hollow: of a study that does not answer." if several else "",
    )


def _page(parts: Sequence[str]) -> str:
    head = "# The headline: K-FAC against tuned first-order methods"
    foot = (
        "Drawn by `kronscale reproduce headline`; [the protocol](../../docs/headline.md) says what was fixed "
        "before which runs."
    )
    return "\n\n".join([head, *parts, foot]) + "\n"


def _records(table: pd.DataFrame) -> list[dict[str, Any]]:
    return [{str(name): value for name, value in row.items()} for row in table.to_dict("records")]


def _saved(speedup: float) -> float:
    """Share of the time that is saved; negative if it takes longer."""
    return 1 - 1 / speedup


def _saved_limits(low: float | None, high: float | None) -> str:
    if low is None or high is None or not low > 0:
        return "(no interval: too few runs)"
    upper = "100 %" if math.isinf(high) else f"{_saved(high):.0%}"
    return f"(95 % interval of the saving: {_saved(low):.0%} to {upper})"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _number(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    return "not reached" if math.isinf(value) else f"{value:.3g}"
