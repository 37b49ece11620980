"""Draws this folder's page, figure and CSV files from its archives: K-FAC against tuned first-order methods.

    python results/headline/draw.py [OUT]

The protocol, in docs/lab-notebook, was fixed before the runs; what is computed from them is fixed here.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from analysis import Study, load
from analysis.comparisons import compared
from analysis.figures import drawing
from analysis.figures.drawing import Drawing, save, sentence
from analysis.metrics import time_to_accuracy
from analysis.report.findings import cautions
from analysis.report.markup import to_markdown
from analysis.report.study_facts import targets
from analysis.report.tables import tuning_tables
from analysis.rules import SCORINGS, median_score
from analysis.statistics.intervals import level
from analysis.tuning import slowed_trials, slowed_words, trials

HERE = Path(__file__).parent
PROTOCOL = "../../docs/lab-notebook/2026-11-24-headline-protocol.md"
PILOT, TUNING = "-pilot", "-tuning"  # in the names of sweeps: of one that sets a target, of a study's trials
ANSWERS = ("headline-again", "headline")
"""The studies that may answer, the first of them that was run; the protocol fixed it beforehand."""
PAPERS_BASELINE = "sgd"
GOAL, SECOND_GOAL = 0.25, 0.18  # less time: the goal of the study, and SC20's abstract
DATA = {"cifar10": "CIFAR-10 (JPEG copy)"}  # what the archives were run on

SETTING = ["model", "batch", "precision", "ranks"]
POINT = ["study", *SETTING]
"""What a comparison holds fixed."""
SPEEDUP = ["speedup", "low", "high", "method", "fewer_epochs", "cost_ratio"]
COLUMNS = [
    "study", "workload", *SETTING, "arm", "kfac", "runs", "reached", "median_seconds", "baseline", *SPEEDUP,
    "chosen",
]  # fmt: skip

Row = dict[str, Any]
Arms = dict[str, pd.DataFrame]
"""The scored runs of every arm at a point."""


def main(out: Path) -> None:
    """Write `README.md`, `speedup.csv`, `runs.csv`, `trials.csv`, `rules.csv` and the figure into `out`."""
    archives = sorted(HERE.glob("*.tar.xz"))
    study = load(archives)
    study = study.of_cells(set(study.cells.loc[~study.cells["sweep"].str.contains(PILOT), "cell"]))
    tunings = {
        str(sweep).replace(TUNING, ""): study.of_cells(set(cells["cell"]))
        for sweep, cells in study.cells[study.cells["trial"].notna()].groupby("sweep", sort=True)
    }
    table, rules = speedups(study, tunings), by_rule(study, tunings)
    out.mkdir(parents=True, exist_ok=True)
    trial_rows = [trials(own).assign(study=name) for name, own in tunings.items()]
    tried = pd.concat(trial_rows, ignore_index=True)
    tried.insert(0, "study", tried.pop("study"))
    for name, rows in {"speedup": table, "runs": runs_of(study), "rules": rules, "trials": tried}.items():
        rows.to_csv(out / f"{name}.csv", index=False, lineterminator="\n")
    caption = caption_of(study, table)
    with drawing.in_style():
        save(draw(table, caption), out, "headline")
    alone = study.of_cells(set(study.cells.loc[study.cells["trial"].isna(), "cell"]))
    text = [
        "# The headline: K-FAC against tuned first-order methods",
        *answers(table, study),
        goals(table),
        "![Speed-ups over the best first-order arm](headline.png)",
        f"*{caption}*",
        "## Every comparison\n\n" + to_markdown(shown(table)),
        f"## The same runs under every rule\n\n{rules_said(rules)}\n\n{to_markdown(shown_rules(rules))}",
        *tuning_said(study, tunings),
        "## Cautions\n\n" + "\n".join(f"- {line}" for line in cautions(alone)),
        "Archives: " + ", ".join(f"`{path.name}`" for path in archives) + ".",
        f"Drawn by `python results/headline/draw.py`; [the protocol]({PROTOCOL}) says what was fixed before "
        "which runs.",
    ]
    (out / "README.md").write_text("\n\n".join(text) + "\n", encoding="utf-8")


def points(study: Study) -> Iterator[tuple[Row, Arms]]:
    """The scored runs of every study and setting, without trials."""
    cells = study.cells.assign(
        study=study.cells["sweep"], batch=study.cells["global_batch_size"], ranks=study.cells["world_size"],
        kfac=study.cells["strategy"].notna(), precision=study.value_of("training.precision").astype("str"),
        model=[str(model or "its network") for model in study.value_of("workload.options.model")],
    )  # fmt: skip
    fixed = ["study", "workload", *SETTING]
    cells = cells.loc[cells["trial"].isna(), ["run", *fixed, "kfac"]]
    for key, runs in time_to_accuracy(study).merge(cells, on="run").groupby(fixed, sort=True):
        arms_of = runs.groupby("method")["arm"].nunique()
        arms = {}
        for arm, group in runs.groupby("arm", sort=False):  # by its method if that has one arm there
            method = str(group["method"].iloc[0])
            arms[method if arms_of[method] == 1 else str(arm)] = group
        yield dict(zip(fixed, key, strict=True)), arms


def speedups(study: Study, tunings: dict[str, Study]) -> pd.DataFrame:
    """One row per point and arm: how many times sooner than the best first-order arm it is there.

    The baseline is the first-order arm with the smallest median seconds in these very runs, so an accident of
    the runs favours the first-order side. `cost_ratio`: seconds per epoch, the arm's over the baseline's; an
    arm breaks even where it equals `fewer_epochs`. `chosen`: K-FAC's arm whose method had the best trial of
    all of K-FAC's in the tuning or, without trials, the arm with the smallest median.
    """
    rows = []
    for point, arms in points(study):
        medians = {arm: level(runs["scored_seconds"].tolist()).estimate for arm, runs in arms.items()}
        order = sorted(arms, key=lambda arm: (bool(arms[arm]["kfac"].any()), medians[arm], arm))
        of_kfac = [arm for arm in order if arms[arm]["kfac"].any()]
        baseline = next((arm for arm in order if arm not in of_kfac), "")
        best = best_tuned(tunings.get(point["study"]))
        named = [arm for arm in of_kfac if arms[arm]["method"].iloc[0] == best]
        for arm in order:
            row = point | {
                "arm": arm, "kfac": arm in of_kfac, "runs": len(arms[arm]), "baseline": baseline,
                "reached": int(arms[arm]["reached"].sum()), "median_seconds": medians[arm],
                "chosen": arm == (named or of_kfac or [""])[0],
            }  # fmt: skip
            rows.append(row | (against(arms, arm, baseline) if baseline and arm != baseline else {}))
    return pd.DataFrame(rows, columns=COLUMNS)


def best_tuned(tuning: Study | None) -> str:
    """The method of K-FAC with the best trial; empty if there are no trials."""
    if tuning is None:
        return ""
    of_kfac = set(tuning.cells.loc[tuning.cells["strategy"].notna(), "method"])
    table = trials(tuning).sort_values(["median_seconds", "method"], kind="stable")
    return next((str(method) for method in table["method"] if method in of_kfac), "")


def against(arms: Arms, arm: str, base: str) -> Row:
    """The columns `SPEEDUP`: how many times sooner `arm` is at the target than `base`, and why."""
    family, own, other = len(arms) - 1, arms[arm], arms[base]
    found, epochs = (compared(other, own, f"scored_{what}", family) for what in ("seconds", "epochs"))
    timed = [runs.dropna(subset="seconds_per_epoch") for runs in (own, other)]
    cost = compared(timed[0], timed[1], "seconds_per_epoch", family)
    numbers = (found.estimate, found.low, found.high, found.method, epochs.estimate, cost.estimate)
    return dict(zip(SPEEDUP, numbers, strict=True))


def by_rule(study: Study, tunings: dict[str, Study]) -> pd.DataFrame:
    """The speed-up of the chosen arm under every rule of time to accuracy that can score these runs."""
    point = [*POINT, "arm"]
    own = speedups(study, tunings)
    chosen, tables = own[own["chosen"]][point], []
    for name, scoring in SCORINGS.items():
        ruled = replace(study, scoring=scoring)
        table = speedups(ruled, tunings) if scoring.aggregate is median_score else scores(ruled)
        table = table.merge(chosen, on=point).assign(rule=name, about=scoring.about)
        tables.append(table[["rule", "about", *point, "baseline", "speedup", "low", "high"]])
    return pd.concat(tables, ignore_index=True)


def scores(study: Study) -> pd.DataFrame:
    """Speed-ups by rules that make one number of all runs: the best first-order arm's over each arm's."""
    rows = []
    for point, arms in points(study):
        score = {arm: study.scoring.aggregate(runs) for arm, runs in arms.items()}
        valid = [arm for arm in arms if not arms[arm]["kfac"].any() and math.isfinite(score[arm])]
        if valid:
            best = min(valid, key=lambda arm: (score[arm], arm))
            fixed = point | {"baseline": best, "low": math.nan, "high": math.nan}
            rows += [fixed | {"arm": arm, "speedup": score[best] / score[arm]} for arm in score]
    return pd.DataFrame(rows, columns=[*POINT, "arm", "baseline", "speedup", "low", "high"])


def runs_of(study: Study) -> pd.DataFrame:
    """Every scored run of a study."""
    columns = ["run", "sweep", "global_batch_size", "trial"]
    scored = time_to_accuracy(study).merge(study.cells[columns], on="run")
    return scored[scored["trial"].isna()][
        [
            "run", "sweep", "arm", "method", "global_batch_size", "world_size", "seed", "block", "reached",
            "seconds", "epochs", "seconds_per_epoch",
        ]
    ]  # fmt: skip


def answers(table: pd.DataFrame, study: Study) -> list[str]:
    """Does the chosen K-FAC arm reach the target sooner, and by how much? The main point first.

    The main point is that of the study that answers with most arms, and of those on most ranks.
    """
    arms_at = {dict_key(point): arms for point, arms in points(study)}
    rows = [row for row in rows_of(table) if row["chosen"] and row["baseline"] and row["kfac"]]
    if not rows:
        return ["**Nothing is decided**: no point has both a K-FAC arm and a first-order arm."]
    run = {row["study"] for row in rows}
    answering = next((name for name in ANSWERS if name in run), rows[0]["study"])
    sizes = table.groupby(SETTING)["arm"].nunique().to_dict()
    main_row = max(
        (row for row in rows if row["study"] == answering),
        key=lambda row: (sizes[tuple(row[name] for name in SETTING)], row["ranks"]),
    )
    said = [answer(main_row, study), *over_papers_baseline(main_row, arms_at[dict_key(main_row)])]
    for row in rows:
        if row is not main_row and row["study"] not in superseded(table):
            also = over_papers_baseline(row, arms_at[dict_key(row)])
            said.append(" ".join([answer(row, study), *also]))
    return said


def answer(row: Row, study: Study) -> str:
    """One sentence about a point."""
    where = f"On {DATA.get(row['workload'], row['workload'])} ({words(row)}), K-FAC (`{row['arm']}`)"
    rival = f"the best tuned first-order method (`{row['baseline']}`)"
    goal = "; ".join(targets(study.only(study.cells["sweep"] == row["study"])))
    speedup, low, high = row["speedup"], row["low"], row["high"]
    if not math.isfinite(speedup) or speedup == 0:
        return f"**No result**: {where} or {rival} did not reach the target ({goal}) in its median run."
    parts, percent = factors(row), saved(speedup)
    if is_number(low) and low > 1:
        less = f"{percent:.0%} less time {limits(low, high)}"
        return f"**Yes**: {where} reaches the target ({goal}) in {less} than {rival}; {parts}."
    if is_number(high) and high < 1:
        more = f"(95 % interval: {-saved(high):.0%} to {-saved(low):.0%})"
        longer = f"{-percent:.0%} more time {more} to the target ({goal}) than {rival}"
        return f"**No**: {where} needs {longer}; {parts}."
    less = f"{abs(percent):.0%} {'less' if percent > 0 else 'more'} time {limits(low, high)}"
    return (
        f"**Not shown**: {where} takes {less} to the target ({goal}) than {rival}, which these runs cannot "
        f"tell from no difference; {parts}."
    )


def over_papers_baseline(row: Row, arms: Arms) -> list[str]:
    """The chosen arm against SGD alone, where another first-order arm is the best."""
    if row["baseline"] == PAPERS_BASELINE or PAPERS_BASELINE not in arms:
        return []
    found = against(arms, row["arm"], PAPERS_BASELINE)
    compare = f"Against `{PAPERS_BASELINE}` alone, with which the papers compare"
    if not is_number(found["speedup"]) or not found["speedup"]:
        both = {arm: arms[arm]["reached"] for arm in (PAPERS_BASELINE, row["arm"])}
        counts = ", ".join(f"`{arm}` in {reached.sum()} of {len(reached)}" for arm, reached in both.items())
        return [f"{compare}: no ratio, as a median run missed; runs that reached it: {counts}."]
    percent = saved(found["speedup"])
    more = f"{abs(percent):.0%} {'less' if percent > 0 else 'more'} time"
    return [f"{compare}: {more} {limits(found['low'], found['high'])}."]


def goals(table: pd.DataFrame) -> str:
    """What the study set out to show, and whether it did; else the point with an interval nearest to it."""
    rows = rows_of(table[table["kfac"] & ~table["study"].isin(superseded(table))])
    known = [row for row in rows if is_number(row["speedup"]) and is_number(row["low"])]
    met = [row for row in known if row["low"] > 1 and saved(row["speedup"]) >= GOAL]
    second = [row for row in known if row["low"] > 1 and saved(row["speedup"]) >= SECOND_GOAL]
    several = len({tuple(row[name] for name in SETTING) for row in second}) > 1
    first, other = ("shown" if done else "not shown" for done in (bool(met), bool(met) and several))
    said = (
        f"Goals: at least {GOAL:.0%} less time in one setting, with the interval above zero: {first}; "
        f"SC20's {SECOND_GOAL:.0%} in a second: {other}."
    )
    if met or not known:
        return said
    near = max(known, key=lambda row: (row["speedup"], row["arm"]))
    speedup = f"a speed-up of {near['speedup']:.2f}; {factors(near)}"
    return f"{said} The nearest is `{near['arm']}` ({words(near)}): {speedup}."


def superseded(table: pd.DataFrame) -> list[str]:
    """Names of studies that a later one of `ANSWERS` replaces."""
    return [name for name in ANSWERS if name in set(table["study"])][1:]


def words(row: Row) -> str:
    """Such as `resnet8, batch 512, bfloat16, 2 ranks`."""
    return f"{row['model']}, batch {row['batch']:,}, {row['precision']}, {drawing.ranks(row['ranks'])}"


def factors(row: Row) -> str:
    """What a speed-up is made of."""
    epochs, cost = row["fewer_epochs"], row["cost_ratio"]
    if not is_number(epochs) or not is_number(cost) or not epochs:
        return "its epochs cannot be compared"
    return (
        f"it needs {1 / epochs:.2f} times the epochs, each takes {cost:.2f} times as long; it would "
        f"break even at {epochs:.2f} times"
    )


def saved(speedup: float) -> float:
    """Share of the time that is saved; negative if it takes longer."""
    return 1 - 1 / speedup


def limits(low: float | None, high: float | None) -> str:
    """The limits of a speed-up as those of the saving."""
    if low is None or high is None or not low > 0:
        return "(no interval: too few runs)"
    endless = "100%, as a run that missed counts as infinitely slow"
    upper = endless if math.isinf(high) else f"{saved(high):.0%}"
    return f"(95 % interval of the saving: {saved(low):.0%} to {upper})"


def is_number(value: object) -> bool:
    """Whether a cell of these tables holds a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)


def dict_key(row: Row) -> tuple[Any, ...]:
    """A point as a key."""
    return tuple(row[name] for name in POINT)


def rows_of(table: pd.DataFrame) -> list[Row]:
    """Rows as mappings."""
    return [{str(name): value for name, value in row.items()} for row in table.to_dict("records")]


def tuning_said(study: Study, tunings: dict[str, Study]) -> list[str]:
    """How the methods were tuned, a table for every study."""
    text = [
        "## How each method was tuned\n\nEqual numbers of trials in a study; every trial is in `trials.csv`. "
        "Regret: the median trial's time over the best's."
    ]
    run = set(study.cells.loc[study.cells["trial"].isna(), "sweep"])
    for name, own in tunings.items():
        of_study = f"For `{name}`" if name in run else f"For `{name}`, which has not been run"
        text.append(f"{of_study}:\n\n{to_markdown(tuning_tables(own)[0])}")
        text += [f"- {line}." for line in slowed_words(slowed_trials(own))]
    return text


def rules_said(rules: pd.DataFrame) -> str:
    """What the table of rules shows."""
    left_out = ", ".join(name for name in SCORINGS if name not in set(rules["rule"]))
    return sentence(
        "Speed-up of the K-FAC arm chosen by the tuning over the best first-order arm of each rule. MLPerf's",
        "and AlgoPerf's rules make one number of all runs of an arm: a ratio without an interval.",
        f"Not scored: {left_out}, for runs that end at their first evaluation at the target."
        if left_out
        else "",
    )


def shown(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of `speedup.csv` in few columns."""
    own = places(table)
    own["reached"] = [f"{got} of {runs}" for got, runs in zip(table["reached"], table["runs"], strict=True)]
    own["median seconds"] = [number(value) for value in table["median_seconds"]]
    own["speed-up"] = intervals(table)
    for name, title in (("fewer_epochs", "times fewer epochs"), ("cost_ratio", "cost of an epoch")):
        own[title] = [number(value) for value in table[name]]
    return own.assign(chosen=["yes" if chosen else "" for chosen in table["chosen"]])


def shown_rules(rules: pd.DataFrame) -> pd.DataFrame:
    """The rows of `rules.csv` in few columns."""
    own = places(rules).assign(over=rules["baseline"], speed=intervals(rules), about=rules["about"])
    own.insert(0, "rule", rules["rule"])
    return own.rename(columns={"speed": "speed-up"})


def places(table: pd.DataFrame) -> pd.DataFrame:
    """Study, setting in words, and arm of every row."""
    settings = [words(row) for row in rows_of(table)]
    return pd.DataFrame({"study": table["study"], "setting": settings, "arm": table["arm"]})


def intervals(table: pd.DataFrame) -> list[str]:
    """Such as `0.69 [0.65, 0.74]`; a dash for the baseline itself."""
    found = []
    for row in rows_of(table):
        estimate, low, high = (number(row[name]) for name in ("speedup", "low", "high"))
        found.append(estimate if low == "–" else f"{estimate} [{low}, {high}]")
    return found


def number(value: Any) -> str:
    """Three digits, or what the number is not."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    return "not reached" if math.isinf(value) else f"{value:.3g}"


def caption_of(study: Study, table: pd.DataFrame) -> str:
    """Of the figure."""
    goal_of = {
        f" at batch {batch:,}": "; ".join(targets(study.only(study.cells["sweep"] == name)))
        for batch, name in zip(table["batch"], table["study"], strict=True)
    }
    one = len(set(goal_of.values())) == 1
    goal = next(iter(goal_of.values())) if one else "; ".join(f"{said}{at}" for at, said in goal_of.items())
    return sentence(
        f"Left: how many times sooner than the best first-order arm each arm is at the target ({goal}),",
        "with 95 % limits; in brackets the runs that reached it.",
        "Right: the same as epochs saved against what an epoch costs; above the line an arm saves time.",
        "Hollow: of a study that a later one replaces." if superseded(table) else "",
    )


def draw(table: pd.DataFrame, caption: str) -> Drawing:
    """Left: every arm's speed-up. Right: epochs saved against what an epoch costs."""
    rows = table[(table["baseline"] != "") & (table["arm"] != table["baseline"])].reset_index(drop=True)
    looks = drawing.styles(rows["arm"])
    figure, axes = drawing.panels(drawing.TWO_COLUMNS, max(2.7, 0.9 + 0.17 * len(rows)), columns=2)
    old = superseded(table)
    marks = []
    for row in rows_of(rows):
        look = looks[row["arm"]]
        mark = {"color": look.colour, "marker": look.marker, "linestyle": "none", "markersize": 5}
        marks.append(mark | ({"markerfacecolor": "white"} if row["study"] in old else {}))
    draw_speedups(axes[0], rows, marks)
    draw_break_even(axes[1], rows, marks)
    drawing.legend_below(figure, drawing.handles(looks), columns=min(len(looks), 4))
    return Drawing(figure, rows, caption)


def draw_speedups(axis: Axes, rows: pd.DataFrame, marks: list[Row]) -> None:
    """A row for every arm; those whose speed-up is not known, since a median run missed, have no point."""
    several = rows[POINT].drop_duplicates()["study"].duplicated().any()
    studies = rows["study"].nunique() > 1
    labels = []
    for place, (row, mark) in enumerate(zip(rows_of(rows), marks, strict=True)):
        if row["low"] is not None and math.isfinite(row["low"]):
            high = row["high"] if row["high"] is not None and math.isfinite(row["high"]) else row["speedup"]
            axis.plot([row["low"], high], [place, place], color=mark["color"], linewidth=1.2)
        if math.isfinite(row["speedup"]):
            axis.plot(row["speedup"], place, **mark)
        elif pd.isna(row["speedup"]):
            look = {"transform": axis.get_yaxis_transform(), "va": "center", "fontsize": 7}
            axis.text(0.02, place, "a median run missed", color=mark["color"], **look)
        point = f"{row['model']} b{row['batch']} p{row['ranks']}: " if several else ""
        point = f"{row['study']}: {point}" if studies else point
        labels.append(f"{point}{row['arm']} ({row['reached']}/{row['runs']})")
    axis.set_yticks(range(len(rows)), labels)
    axis.invert_yaxis()
    axis.grid(False, axis="y")
    axis.grid(True, axis="x", color="#dddddd", linewidth=0.5)
    axis.axvline(1, color=drawing.GREY, linewidth=0.8)
    axis.set_xlabel("speed-up over the best first-order arm")


def draw_break_even(axis: Axes, rows: pd.DataFrame, marks: list[Row]) -> None:
    """Above the line an arm saves more epochs than one of its epochs costs."""
    ends = [1.0]
    for row, mark in zip(rows_of(rows), marks, strict=True):
        if is_number(row["fewer_epochs"]) and is_number(row["cost_ratio"]):
            axis.plot(row["cost_ratio"], row["fewer_epochs"], **mark)
            ends += [row["cost_ratio"], row["fewer_epochs"]]
    low, high = 0.9 * min(ends), 1.1 * max(ends)
    axis.plot([low, high], [low, high], color=drawing.GREY, linewidth=0.8)
    axis.annotate("break-even", (high, high), ha="right", va="bottom", color=drawing.GREY, fontsize=7)
    axis.set_xlim(low, high)
    axis.set_ylim(low, 1.05 * high)
    axis.set_xlabel("seconds per epoch,\nover the best first-order arm's")
    axis.set_ylabel("times fewer epochs")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
