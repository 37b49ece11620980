"""How often a method is within a factor of the best, over the study's workloads (Dolan & Moré, AlgoPerf)."""

from __future__ import annotations

import math

import pandas as pd

from analysis.figures import drawing
from analysis.figures.drawing import Drawing, NothingToDraw
from analysis.metrics import IDENTITY, time_to_accuracy
from analysis.records.study import Study
from analysis.statistics.intervals import median
from analysis.statistics.profiles import LARGEST_RATIO, performance_ratios, profile, profile_score

_BROKEN = ("FAILED", "TIMEOUT", "OOM")  # lost nodes and preemptions are not the method's fault


def draw(study: Study) -> Drawing:
    """A step line per method; a workload here is a setting (data, model, batch, target) on one world size."""
    runs = time_to_accuracy(study)
    if runs.empty:
        raise NothingToDraw("no run has trained up to its first evaluation")
    runs = _with_misses(study, runs)
    tried = runs.groupby("workload")["method"].nunique()
    runs = runs[runs["workload"].isin(tried[tried > 1].index)]
    if runs["workload"].nunique() < 2:
        raise NothingToDraw("no second workload that several methods ran")
    grouped = runs.groupby(["workload", "method"])["scored_seconds"]
    seconds = grouped.apply(lambda values: median(values.tolist())).unstack()
    ratios = performance_ratios(seconds)
    if ratios.empty:
        raise NothingToDraw("no workload that any method solved")
    order = list(dict.fromkeys(runs["method"]))
    looks = drawing.styles(order)
    figure, (axis,) = drawing.panels(drawing.ONE_COLUMN, 2.9, columns=1)
    scores = {name: profile_score(ratios[name]) for name in order}
    for index, name in enumerate(order):
        steps, shares = profile(ratios[name])
        x, y = [*steps, LARGEST_RATIO], [*shares * 100, shares[-1] * 100]
        axis.plot(x, [value + index * 0.6 for value in y], looks[name].line, drawstyle="steps-post",
                  color=looks[name].colour, linewidth=1.1)  # fmt: skip
        axis.plot(
            steps, shares * 100 + index * 0.6, looks[name].marker, color=looks[name].colour, markersize=3
        )
    axis.set_xlim(1 - 0.05, LARGEST_RATIO)
    axis.set_ylim(0, 105)
    axis.set_xlabel("time over the best method's")
    axis.set_ylabel("workloads within that factor (%)")
    drawing.legend_below(figure, drawing.handles(looks, lines=True), columns=min(len(looks), 3))
    tall = ratios.reset_index().melt("workload", value_name="ratio").dropna()
    some = [f"{name} {run} of them" for name, run in ratios.notna().sum().items() if run < len(ratios)]
    numbers = runs.merge(tall, on=["workload", "method"])
    numbers["score"] = numbers["method"].map(scores)
    n = runs.groupby(["workload", "method"])["run"].nunique()
    caption = drawing.sentence(
        f"Performance profiles over {len(ratios)} workloads (settings and world sizes of several methods;"
        f" n = {n.min()}"
        + (f" to {n.max()}" if n.max() > n.min() else "")
        + " runs each, medians, misses infinite"
        + (f"; {', '.join(some)}: each is judged on those it was run on;" if some else ";"),
        f"{study.scoring.about}). AlgoPerf's score, the area up to {LARGEST_RATIO:g} over its width:",
        ", ".join(f"{name} {score:.2f}" for name, score in sorted(scores.items(), key=lambda one: -one[1]))
        + ".",
        "Lines that coincide are shifted by half a point. No whiskers.",
        f"{len(seconds) - len(ratios)} workloads that nobody solved are left out."
        if len(seconds) > len(ratios)
        else "",
        drawing.remarks(study, runs),
    )
    numbers["ratio"] = numbers["ratio"].where(numbers["ratio"] < math.inf, math.inf)
    frame: pd.DataFrame = numbers
    return Drawing(figure, frame, caption)


def _with_misses(study: Study, runs: pd.DataFrame) -> pd.DataFrame:
    """Scored runs by workload, and as misses those of methods whose cells there all broke unscored."""
    broken = study.cells[study.cells["state"].isin(_BROKEN)][IDENTITY]
    broken = broken.assign(reached=False, scored_seconds=math.inf)
    every = pd.concat([runs, broken[~broken["run"].isin(runs["run"])]], ignore_index=True)
    every["workload"] = every["setting"] + " on " + every["world_size"].astype("str")
    scored = every.groupby(["workload", "method"])["run"].transform(lambda own: own.isin(runs["run"]).any())
    return every[every["run"].isin(runs["run"]) | ~scored.astype("bool")].reset_index(drop=True)
