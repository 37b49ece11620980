"""The page of the headline, its CSV files and its figure, from archives of the study."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.figures.drawing import sentence
from analysis.figures.figure_files import save
from analysis.headline.answer import answer, goals, other_settings, papers_baseline, superseded
from analysis.headline.comparison import POINT, SETTING, Point, scores, speedups, tunings
from analysis.headline.figure import draw
from analysis.metrics import time_to_accuracy
from analysis.records.study import Study
from analysis.report.findings import cautions
from analysis.report.markup import to_markdown
from analysis.report.study_facts import targets
from analysis.report.tables import tuning_tables
from analysis.rules import SCORINGS, median_score
from analysis.tuning import slowed_trials, slowed_words, trials

FILES = ("speedup.csv", "runs.csv", "trials.csv", "rules.csv")
FIGURE = "headline"
PILOT = "-pilot"
"""In the names of sweeps that only set a target; nothing here is computed from them."""

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
    caption = _caption(study, table)
    save(draw(table, caption, superseded(table)), out, FIGURE)
    text = [
        answer(table, study),
        *papers_baseline(table, study),
        *other_settings(table, study),
        *goals(table),
        f"![Speed-ups over the best first-order arm]({FIGURE}.png)",
        f"*{caption}*",
        "## Every comparison\n\n" + to_markdown(_shown(table)),
        f"## The same runs under every rule\n\n{_rules_said(rules)}\n\n{to_markdown(_shown_rules(rules))}",
        *_tuning(study, out),
        "## Cautions\n\n" + "\n".join(f"- {line}" for line in cautions(_without_trials(study))),
        "Archives: " + ", ".join(f"`{name}`" for name in archives) + ".",
    ]
    page.write_text(_page(text), encoding="utf-8")
    return page


def _by_rule(study: Study) -> pd.DataFrame:
    """The speed-up of the chosen arm under every rule of time to accuracy that can score these runs."""
    own = speedups(study)
    point = [*POINT, "arm"]
    chosen = own[own["chosen"]][point]
    tables = []
    for name, scoring in SCORINGS.items():
        ruled = replace(study, scoring=scoring)
        table = (speedups if scoring.aggregate is median_score else scores)(ruled).merge(chosen, on=point)
        table = table.assign(rule=name, about=scoring.about)
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
    run = set(study.cells.loc[study.cells["trial"].isna(), "sweep"])
    for name, own in by_study.items():
        methods, _ = tuning_tables(own)
        of_study = f"For `{name}`" if name in run else f"For `{name}`, which has not been run"
        text.append(f"{of_study}:\n\n{to_markdown(methods)}")
        text += [f"- {sentence}." for sentence in slowed_words(slowed_trials(own))]
    return text


def _without_trials(study: Study) -> Study:
    return study.of_cells(set(study.cells.loc[study.cells["trial"].isna(), "cell"]))


def _shown(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of `speedup.csv` in few columns."""
    shown = _places(table)
    shown["reached"] = [f"{got} of {runs}" for got, runs in zip(table["reached"], table["runs"], strict=True)]
    shown["median seconds"] = [_number(value) for value in table["median_seconds"]]
    shown["speed-up"] = _intervals(table)
    for name, title in (("fewer_epochs", "times fewer epochs"), ("cost_ratio", "cost of an epoch")):
        shown[title] = [_number(value) for value in table[name]]
    return shown.assign(chosen=["yes" if chosen else "" for chosen in table["chosen"]])


def _shown_rules(rules: pd.DataFrame) -> pd.DataFrame:
    shown = _places(rules)
    shown["over"] = rules["baseline"]
    shown["speed-up"] = _intervals(rules)
    shown.insert(0, "rule", rules["rule"])
    return shown.assign(about=rules["about"])


def _places(table: pd.DataFrame) -> pd.DataFrame:
    rows = table[[*POINT, "arm"]].to_dict("records")
    settings = [Point(row["study"], "", *(row[name] for name in SETTING)).words for row in rows]
    return pd.DataFrame({"study": table["study"], "setting": settings, "arm": table["arm"]})


def _intervals(table: pd.DataFrame) -> list[str]:
    """Such as `0.69 [0.65, 0.74]`; a dash for the baseline itself."""
    found = []
    for row in table[["speedup", "low", "high"]].to_dict("records"):
        estimate, low, high = (_number(row[name]) for name in ("speedup", "low", "high"))
        found.append(estimate if low == "–" else f"{estimate} [{low}, {high}]")
    return found


def _caption(study: Study, table: pd.DataFrame) -> str:
    goals = {
        f" at batch {batch:,}": "; ".join(targets(study.only(study.cells["sweep"] == name)))
        for batch, name in zip(table["batch"], table["study"], strict=True)
    }
    one = len(set(goals.values())) == 1
    goal = next(iter(goals.values())) if one else "; ".join(f"{said}{at}" for at, said in goals.items())
    return sentence(
        f"Left: how many times sooner than the best first-order arm each arm is at the target ({goal}),",
        "with 95 % limits; in brackets the runs that reached it.",
        "Right: the same as epochs saved against what an epoch costs; above the line an arm saves time.",
        "Hollow: of a study that a later one replaces." if superseded(table) else "",
    )


def _page(parts: Sequence[str]) -> str:
    head = "# The headline: K-FAC against tuned first-order methods"
    foot = (
        "Drawn by `kronscale reproduce headline`; [the protocol](../../docs/headline.md) says what was fixed "
        "before which runs."
    )
    return "\n\n".join([head, *parts, foot]) + "\n"


def _number(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    return "not reached" if math.isinf(value) else f"{value:.3g}"
