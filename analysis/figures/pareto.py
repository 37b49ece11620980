"""Time against memory, with the Pareto front of every setting."""

from __future__ import annotations

from matplotlib.lines import Line2D

from analysis.figures import drawing
from analysis.figures.drawing import Drawing, NothingToDraw
from analysis.metrics import IDENTITY, in_order, time_to_accuracy
from analysis.records.study import Study
from analysis.statistics.intervals import median
from analysis.steps import peak_bytes, run_speeds

COLUMNS = 3


def draw(study: Study) -> Drawing:
    """A panel per world size; time to the target where runs reached it, else time per step."""
    runs = study.cells[IDENTITY].merge(peak_bytes(study), on="run").merge(run_speeds(study), on="run")
    runs = runs.merge(time_to_accuracy(study)[["run", "scored_seconds"]], on="run", how="left")
    if runs.empty:
        raise NothingToDraw("no run has recorded both its memory and a window of steps")
    runs = in_order(study, runs)
    by_target = bool((runs.groupby(["arm", "world_size"])["scored_seconds"].median() < float("inf")).any())
    runs["time"] = runs["scored_seconds"] if by_target else runs["seconds_per_step"] * 1e3
    own_runs = {int(str(size)): own for size, own in runs.groupby("world_size")}
    figure, axes = drawing.panel_grid(
        [drawing.ranks_label(size, own) for size, own in own_runs.items()], COLUMNS, 2.3, 0.7,
        ylabel="time to target (s)" if by_target else "time per step (ms)",
    )  # fmt: skip
    looks = drawing.arm_styles(study, runs["arm"])
    for own, axis in zip(own_runs.values(), axes, strict=True):
        centres: dict[str, list[tuple[float, float]]] = {}
        for arm, group in own.groupby("arm", sort=False):
            look = looks[str(arm)]
            shown = group[group["time"] < float("inf")]
            axis.plot(shown["peak_bytes"] / 1e6, shown["time"], look.marker, color=look.colour, markersize=3,
                      alpha=0.4, mew=0)  # fmt: skip
            centre = median((group["peak_bytes"] / 1e6).tolist()), median(group["time"].tolist())
            if centre[1] < float("inf"):
                axis.plot(*centre, look.marker, color=look.colour, markersize=5.5)
                centres.setdefault(str(group["setting"].iloc[0]), []).append(centre)
        for beside in centres.values():  # settings apart: a smaller model always wins in both
            axis.plot(*zip(*_front(beside), strict=True), "-", color=drawing.GREY, linewidth=0.8, zorder=0)
        axis.set_xlabel("peak memory per rank (MB)")
        axis.set_ylim(bottom=0)
    front_key = Line2D([], [], color=drawing.GREY, label="not beaten in both")
    drawing.legend_below(figure, [*drawing.handles(looks), front_key], columns=4)
    kind = " / ".join(sorted(runs["kind"].unique()))
    what = f"time to the target ({study.scoring.about})" if by_target else "time per step"
    caption = drawing.sentence(
        f"{what.capitalize()} against peak memory ({kind} of the rank that needs most); small markers are",
        f"runs ({drawing.counts(runs)}), large ones their medians, lines join the medians of one setting",
        "that none beats in both. Left and down is better. 1 MB = 1e6 bytes. No whiskers.",
        "Arms whose typical run missed its target have no median here." if by_target else "",
        drawing.remarks(study, runs),
    )
    return Drawing(figure, runs, caption)


def _front(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The Pareto-optimal points of (memory, time), ordered by memory."""
    front: list[tuple[float, float]] = []
    for memory, time in sorted(points):
        if not front or time < front[-1][1]:
            front.append((memory, time))
    return front
