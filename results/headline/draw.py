"""Draws this folder's page, figure and CSV files from its archives: K-FAC against tuned first-order methods.

    python results/headline/draw.py [OUT]

The protocol, docs/headline.md, was fixed before the runs; what is computed from them is fixed here.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import pandas as pd
from matplotlib.ticker import PercentFormatter

from analysis import Study, load
from analysis.comparisons import compared, stopped_early
from analysis.figures import drawing
from analysis.figures.drawing import Drawing, save
from analysis.metrics import time_to_accuracy
from analysis.report.findings import cautions
from analysis.report.markup import to_markdown
from analysis.rules import SCORINGS, median_score
from analysis.statistics.intervals import NO_RATIO as MEDIAN_MISSED
from analysis.statistics.intervals import Interval, holm, level
from analysis.statistics.power import SIGNIFICANT
from analysis.tuning import trials

HERE = Path(__file__).parent
KFAC = "kfac"
VERDICTS = ("K-FAC takes less time than", "K-FAC takes more time than", "no difference is shown from")
NO_RATIO = "no ratio"


class Setting(NamedTuple):
    """A study: its table's heading, shared with its like; its name there; targets, chosen at the second."""

    heading: str
    label: str
    targets: tuple[float, ...]
    has_table: bool = True

    @property
    def title(self) -> str:
        return f"{self.heading}: {self.label}"


IMAGES = "CIFAR-10 (JPEG copy), 2 ranks"
POISSON = "Poisson equation in 2d, 1 rank"
STUDIES = {
    "resnet8-512": Setting(IMAGES, "ResNet-8, batch 512", (0.705, 0.725)),
    "resnet8-2048": Setting(IMAGES, "ResNet-8, batch 2,048, grafting", (0.52, 0.563), has_table=False),
    "resnet8-2048-norm": Setting(IMAGES, "ResNet-8, batch 2,048, fixed norm", (0.52, 0.536, 0.563)),
    "resnet20-512": Setting(IMAGES, "ResNet-20, batch 512", (0.754, 0.774)),
    "poisson-64": Setting(POISSON, "network 64", (1e-3, 1e-4)),
    "poisson-64-64-48-48": Setting(POISSON, "network 64-64-48-48", (1e-3, 1e-4)),
}
COLUMNS = (
    "[The protocol](../../docs/headline.md) was fixed before the trials. *K-FAC saves*: of the other's time, "
    "estimated from the pairs of each block, with 95 % limits, so not the quotient of the medians beside it; "
    "below zero K-FAC takes longer; *p* is after Holm's correction for the other methods. A difference is "
    "said where the interval excludes 0 and p is below 0.05. *By every rule*: the least and the most that it "
    "saves under [the rules of scoring](../../docs/methods.md#statistics); `ratios.csv` has each. There is "
    "no ratio where half of a method's runs or more miss the target, or reach it too late for a rule, and no "
    "row where all miss it; `times.csv` has those, too."
)
LIMITS = (HERE / "limits.md").read_text(encoding="utf-8")
"""What the answers depend on, and where K-FAC is not the choice: written by hand."""


def main(out: Path) -> None:
    """Write `README.md`, `times.csv`, `ratios.csv`, `trials.csv` and the figure into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    loaded = {
        name: load(sorted((HERE / name).glob("*.tar.xz"))) for name in STUDIES if (HERE / name).is_dir()
    }
    studies = {name: alone(study, tuned=False) for name, study in loaded.items()}
    studies = {name: study for name, study in studies.items() if len(study.cells)}
    if not studies:
        raise SystemExit("no study has been run yet, only trials: docs/headline.md has the next command")
    times = pd.concat([times_of(name, study) for name, study in studies.items()], ignore_index=True)
    ratios = pd.concat([ratios_of(name, study) for name, study in studies.items()], ignore_index=True)
    tried = [tried_in(name, alone(loaded[name], tuned=True)) for name in studies]
    tables = {"times": times, "ratios": ratios, "trials": pd.concat(tried, ignore_index=True)}
    for name, table in tables.items():
        table.to_csv(out / f"{name}.csv", index=False, lineterminator="\n")
    with drawing.in_style():
        save(draw(times, ratios), out, "headline")
    text = ["# K-FAC against tuned first-order methods, in seconds", "\n".join(answers(times, ratios))]
    text += ["![Time that K-FAC saves over each method](headline.png)", COLUMNS]
    tabled = [name for name in studies if STUDIES[name].has_table]
    for heading, names in groupby(tabled, key=lambda name: STUDIES[name].heading):
        alike = list(names)
        rows = pd.concat(
            [shown(*(table[table["study"] == name] for table in (times, ratios))) for name in alike]
        )
        text += [f"## {heading}", to_markdown(rows).strip()]
        warned = [f"- {STUDIES[name].label}: {line}" for name in alike for line in cautions(studies[name])]
        text += ["\n".join(warned)] if warned else []
    text.append(LIMITS.strip())
    (out / "README.md").write_text("\n\n".join(text) + "\n", encoding="utf-8")


def alone(study: Study, *, tuned: bool) -> Study:
    """The trials, or the study itself."""
    of_trials = study.cells["trial"].notna()
    return study.of_cells(set(study.cells.loc[of_trials if tuned else ~of_trials, "cell"]))


def tried_in(name: str, study: Study) -> pd.DataFrame:
    """The trials, with their places by the target at which `choose` chose: the second, or the only one."""
    target = STUDIES[name].targets[:2][-1]
    return trials(study.at_target(target)).assign(study=name, target=target)


def at_targets(name: str, study: Study) -> Iterator[tuple[float, str, dict[str, pd.DataFrame]]]:
    """Target, rule, and the scored runs of every method, of every target and rule that can score them."""
    for target in STUDIES[name].targets:
        for rule, scoring in SCORINGS.items():
            runs = time_to_accuracy(replace(study.at_target(target), scoring=scoring))
            methods = {str(method): own for method, own in runs.groupby("method", sort=True)}
            if KFAC in methods:  # else the runs stopped too soon for the rule
                yield target, rule, methods


def times_of(name: str, study: Study) -> pd.DataFrame:
    """By target and method: runs that reached it, median seconds with limits, epochs, seconds an epoch."""
    rows = []
    for target, rule, methods in at_targets(name, study):
        for method, runs in methods.items() if rule == "first" else ():
            seconds, epochs = (level(runs[f"scored_{what}"].tolist()) for what in ("seconds", "epochs"))
            rows.append(
                {
                    "study": name, "target": target, "method": method, "runs": len(runs),
                    "reached": int(runs["reached"].sum()), "seconds": seconds.estimate, "low": seconds.low,
                    "high": seconds.high, "epochs": epochs.estimate,
                    "seconds_per_epoch": level(runs["seconds_per_epoch"].tolist()).estimate,
                }
            )  # fmt: skip
    return pd.DataFrame(rows)


def ratios_of(name: str, study: Study) -> pd.DataFrame:
    """By target, rule and other method: its time over K-FAC's; limits and p where the rule takes medians."""
    rows, ends = [], study.cells[["run", "stop_reason"]]
    for target, rule, methods in at_targets(name, study):
        own = methods.pop(KFAC)
        scoring = SCORINGS[rule]
        for method, runs in methods.items():
            if scoring.aggregate is median_score:
                found = compared(runs, own, "scored_seconds", len(methods))
                refused = stopped_early(runs.merge(ends), own.merge(ends))
                if refused or not found.is_ratio:  # the protocol then gives counts
                    found = Interval(found.estimate, None, None, found.n, refused or MEDIAN_MISSED)
            else:
                found = Interval(
                    scoring.aggregate(runs) / scoring.aggregate(own), None, None, len(runs), rule
                )
            medians = [median_score(each) for each in (runs, own)]
            whole = medians[0] / medians[1] if math.inf in medians else found.estimate  # infinite, 0, or none
            rows.append(
                {"study": name, "target": target, "rule": rule, "method": method, "ratio": whole,
                 "low": found.low, "high": found.high, "p": found.p_value, "how": found.method}
            )  # fmt: skip
    table = pd.DataFrame(rows).astype({"low": float, "high": float, "p": float})
    for _, tested in table.dropna(subset="p").groupby(["target", "rule"]):
        table.loc[tested.index, "p"] = holm(tested["p"].tolist())
    return table


def answers(times: pd.DataFrame, ratios: pd.DataFrame) -> Iterator[str]:
    """For every study whom K-FAC is told from, and in how many runs the others reach the target."""
    first = ratios[ratios["rule"] == "first"]
    for name, own in first.groupby("study", sort=False):
        told = own.assign(verdict=[verdict(row) for row in own.itertuples()])
        said = [f"- **{STUDIES[str(name)].title}.**"]
        for target, rows in told.groupby("target", sort=False):
            here = times[(times["study"] == name) & (times["target"] == target)].set_index("method")
            parts = [f"{kind} {listed(methods)}" for kind in VERDICTS if (methods := of_verdict(rows, kind))]
            if missing := of_verdict(rows, NO_RATIO):
                reached = here.loc[missing, "reached"].sort_values(ascending=False, kind="stable")
                counts = [
                    f"{listed(list(same.index))} in {count}"
                    for count, same in reached.groupby(reached, sort=False)
                ]
                whole = f"K-FAC reaches it in {here.loc[KFAC, 'reached']} of {here.loc[KFAC, 'runs']} runs"
                parts.append(", ".join([whole, *counts]))
            said.append(f"To {target:g}: {'; '.join(parts)}.")
        yield " ".join(said)


def of_verdict(rows: pd.DataFrame, kind: str) -> list[str]:
    """The methods with this verdict."""
    return rows.loc[rows["verdict"] == kind, "method"].tolist()


def listed(methods: list[str]) -> str:
    """Such as "`muon`, `sgd` and `soap`"."""
    *others, last = [f"`{method}`" for method in methods]
    return f"{', '.join(others)} and {last}" if others else last


def verdict(row: object) -> str:
    """What the interval of the ratio and its p say together."""
    ratio, low, high, p = (float(getattr(row, name)) for name in ("ratio", "low", "high", "p"))
    if not math.isfinite(ratio) or not ratio:
        return NO_RATIO
    if p < SIGNIFICANT and (low > 1 or high < 1):
        return VERDICTS[0] if low > 1 else VERDICTS[1]
    return VERDICTS[2]


def saved(row: object) -> str:
    """Such as `20% (15% to 25%), p 0.03`; below zero where K-FAC takes longer."""
    ratio, low, high, p = (float(getattr(row, name)) for name in ("ratio", "low", "high", "p"))
    if not math.isfinite(ratio) or not ratio:
        return NO_RATIO
    limits = "" if math.isnan(low) else f" ({percent(low)} to {percent(high)}), p {p:.2g}"
    return f"{percent(ratio)}{limits}"


def percent(ratio: float) -> str:
    """What K-FAC saves of a time that is `ratio` times its own."""
    return f"{1 - 1 / ratio:.0%}".replace("-0%", "0%")


def under_rules(ratios: list[float], rules: list[str]) -> str:
    """Such as `20% to 27%; none under sustained`: the least and the most that K-FAC saves."""
    found = [ratio for ratio in ratios if math.isfinite(ratio) and ratio]
    if not found:
        return NO_RATIO
    none = [rule for rule, ratio in zip(rules, ratios, strict=True) if ratio not in found]
    ends = " to ".join(dict.fromkeys(percent(ratio) for ratio in (min(found), max(found))))
    return f"{ends}; none under {', '.join(none)}" if none else ends


def shown(times: pd.DataFrame, ratios: pd.DataFrame) -> pd.DataFrame:
    """A row for every target and method that reaches it: times, what K-FAC saves, and every rule's ratio."""
    times = times[times["reached"] > 0]
    ruled = dict(iter(ratios.groupby(["target", "method"])))
    saves, ranges = [], []
    for row in times.itertuples():
        own = ruled.get((row.target, row.method))
        first = () if own is None else own[own["rule"] == "first"].itertuples()
        saves.append("".join(saved(each) for each in first))
        ranges.append("" if own is None else under_rules(own["ratio"].tolist(), own["rule"].tolist()))
    return pd.DataFrame(
        {
            "study": times["study"].map(lambda name: STUDIES[name].label),
            "target": times["target"], "method": times["method"],
            "reached": [f"{row.reached} of {row.runs}" for row in times.itertuples()],
            "seconds": [seconds(row) for row in times.itertuples()],
            "epochs": [number(value) for value in times["epochs"]],
            "seconds an epoch": [number(value) for value in times["seconds_per_epoch"]],
            "K-FAC saves": saves, "by every rule": ranges,
        }
    )  # fmt: skip


def seconds(row: object) -> str:
    """Median with its limits."""
    middle, low, high = (float(getattr(row, name)) for name in ("seconds", "low", "high"))
    return f"{number(middle)} [{number(low)}, {number(high)}]" if math.isfinite(low) else number(middle)


def number(value: float) -> str:
    """Three digits, or what the number is not."""
    return "not reached" if math.isinf(value) else f"{value:.3g}"


def draw(times: pd.DataFrame, ratios: pd.DataFrame) -> Drawing:
    """A row for every study, target and other method: what K-FAC saves of its time."""
    rows = ratios[ratios["rule"] == "first"].reset_index(drop=True)
    saves = 1 - 1 / rows[["ratio", "low", "high"]].replace(0, math.nan)  # a limit is 1 where runs missed
    rows[["saved", "saved_low", "saved_high"]] = saves
    reached = times.set_index(["study", "target", "method"])[["reached", "runs"]]
    looks = drawing.styles(rows["method"])
    figure, (axis,) = drawing.panels(drawing.TWO_COLUMNS, 0.8 + 0.2 * len(rows), columns=1)
    for place, row in enumerate(rows.itertuples()):
        look = looks[row.method]
        if math.isfinite(row.ratio):
            axis.plot(row.saved, place, look.marker, color=look.colour, markersize=5)
            axis.plot([row.saved_low, row.saved_high], [place, place], color=look.colour, linewidth=1.2)
        else:
            where = {"transform": axis.get_yaxis_transform(), "va": "center", "ha": "right", "fontsize": 7}
            count, runs = reached.loc[(row.study, row.target, row.method)]
            own, _ = reached.loc[(row.study, row.target, KFAC)]
            said = f"reached in {count} of {runs} runs, by K-FAC in {own}"
            axis.text(0.99, place, said, color=look.colour, **where)
    titles = [f"{row.study} to {row.target:g}: {row.method}" for row in rows.itertuples()]
    axis.set_yticks(range(len(rows)), titles)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.margins(x=0.08)
    axis.grid(False, axis="y")
    axis.grid(True, axis="x", color="#dddddd", linewidth=0.5)
    axis.axvline(0, color=drawing.GREY, linewidth=0.8)
    axis.xaxis.set_major_formatter(PercentFormatter(1))
    axis.set_xlabel("time to the target that K-FAC saves over the method, with 95 % limits")
    return Drawing(figure, rows, "Time to the target that K-FAC saves, with 95 % limits; six blocks.")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
