"""How often a method is within a factor of the best, by setting and world size (Dolan & Moré, AlgoPerf)."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from analysis.figures import captions, drawing
from analysis.figures.drawing import ArmStyle, Drawing, NothingToDraw
from analysis.figures.worlds import with_own_cpus
from analysis.metrics import IDENTITY, time_to_accuracy
from analysis.records.study import Study
from analysis.statistics.intervals import median
from analysis.statistics.profiles import LARGEST_RATIO, performance_ratios, profile, profile_score

_BROKEN = ("FAILED", "TIMEOUT", "OOM")  # lost nodes and preemptions are not the method's fault


def draw(study: Study) -> Drawing:
    """A step line per method over the settings (data, model, batch, target) and world sizes that it ran."""
    runs = time_to_accuracy(study)
    if runs.empty:
        raise NothingToDraw("no run has trained up to its first evaluation")
    every = _of_several_methods(_with_misses(study, runs))
    runs = _of_several_methods(with_own_cpus(every))
    if runs["workload"].nunique() < 2:
        runs = every
    if runs["workload"].nunique() < 2:
        raise NothingToDraw("no second setting or world size that several methods ran")
    grouped = runs.groupby(["workload", "method"])["scored_seconds"]
    seconds = grouped.apply(lambda values: median(values.tolist())).unstack()
    ratios = performance_ratios(seconds)
    if ratios.empty:
        raise NothingToDraw("no setting or world size at which a method's median run reached the target")
    looks = drawing.styles(runs["method"])
    scores = {name: profile_score(ratios[name]) for name in looks}
    figure, (axis,) = drawing.panels(drawing.ONE_COLUMN, 2.9, columns=1)
    _lines(axis, ratios, looks)
    axis.set_xlabel("time over the best method's")
    axis.set_ylabel(f"{_names(runs)} within that factor (%)")
    entries = drawing.handles(looks, lines=True)
    for entry, (name, score) in zip(entries, scores.items(), strict=True):
        if score == 0:
            why = _why_zero(runs[runs["method"] == name], ratios[name])
            entry.set_label(f"{name}: 0.00, {why}")
    drawing.legend_below(figure, entries, columns=min(len(looks), 3))
    tall = ratios.reset_index().melt("workload", value_name="ratio").dropna()
    numbers = runs.merge(tall, on=["workload", "method"])
    numbers["score"] = numbers["method"].map(scores)
    left_out = [f"{size}*" for size in sorted(set(every["world_size"]) - set(runs["world_size"]))]
    caption = drawing.sentence(
        _caption(study, runs, ratios, scores),
        f"{len(seconds) - len(ratios)} that no method's median run solved are left out."
        if len(seconds) > len(ratios)
        else "",
        f"World sizes with more ranks than CPUs are left out: {', '.join(left_out)}." if left_out else "",
        captions.remarks(study, every, star="" if left_out else captions.WAITED),
    )
    return Drawing(figure, numbers, caption)


def _lines(axis: Axes, ratios: pd.DataFrame, looks: Mapping[str, ArmStyle]) -> None:
    """The profiles, the widest first, so that a line that lies on another one leaves its edges to be seen."""
    widths = np.linspace(min(1.0 + 0.5 * len(looks), 3.5), 1.0, len(looks))
    for (name, look), width in zip(looks.items(), widths.tolist(), strict=True):
        steps, shares = profile(ratios[name])
        axis.plot([*steps, LARGEST_RATIO], [*shares * 100, shares[-1] * 100], look.line,
                  drawstyle="steps-post", color=look.colour, linewidth=width)  # fmt: skip
        axis.plot(steps, shares * 100, look.marker, color=look.colour, markersize=2.0 + width)
    axis.set_xlim(1 - 0.05, LARGEST_RATIO)
    axis.set_ylim(-4, 105)  # or the axis would hide a line at 0


def _names(runs: pd.DataFrame) -> str:
    """What a profile counts: settings, world sizes, or pairs of both."""
    if runs["setting"].nunique() == 1:
        return "world sizes"
    return "settings" if runs["world_size"].nunique() == 1 else "settings and world sizes"


def _why_zero(runs: pd.DataFrame, ratios: pd.Series) -> str:
    """Why a method's profile has no area."""
    if not np.isfinite(runs["scored_seconds"]).any():
        return "no run at the target"
    if not np.isfinite(ratios).any():
        return "its median runs missed"
    return f"over {LARGEST_RATIO:g} times the best"


def _caption(study: Study, runs: pd.DataFrame, ratios: pd.DataFrame, scores: Mapping[str, float]) -> str:
    names = _names(runs)
    over = {"world sizes": "world sizes of one setting"}.get(names, names)
    some = [f"{name} {run} of them" for name, run in ratios.notna().sum().items() if run < len(ratios)]
    n = runs.groupby(["workload", "method"])["run"].nunique()
    ranked = sorted(scores.items(), key=lambda one: -one[1])
    return drawing.sentence(
        f"Performance profiles over {len(ratios)} {over} that several methods ran (n = {n.min()}"
        + (f" to {n.max()}" if n.max() > n.min() else "")
        + " runs each, medians, misses infinite"
        + (f"; {', '.join(some)}: each is judged on those it was run on;" if some else ";"),
        f"{study.scoring.about}). Area under the profile up to {LARGEST_RATIO:g}, over its width",
        "(AlgoPerf's formula, not its rules):",
        ", ".join(f"{name} {score:.2f}" for name, score in ranked) + ".",
        "Where lines coincide, the wider ones lie below.",
    )


def _of_several_methods(runs: pd.DataFrame) -> pd.DataFrame:
    tried = runs.groupby("workload")["method"].nunique()
    return runs[runs["workload"].isin(tried[tried > 1].index)]


def _with_misses(study: Study, runs: pd.DataFrame) -> pd.DataFrame:
    """Scored runs by workload, and as misses those of methods whose cells there all broke unscored."""
    broken = study.cells[study.cells["state"].isin(_BROKEN)][IDENTITY]
    broken = broken.assign(reached=False, scored_seconds=math.inf)
    every = pd.concat([runs, broken[~broken["run"].isin(runs["run"])]], ignore_index=True)
    every["workload"] = every["setting"] + " on " + every["world_size"].astype("str")
    scored = every.groupby(["workload", "method"])["run"].transform(lambda own: own.isin(runs["run"]).any())
    return every[every["run"].isin(runs["run"]) | ~scored.astype("bool")].reset_index(drop=True)
