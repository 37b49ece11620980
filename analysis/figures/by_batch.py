"""Accuracy over batch size, own runs beside the published ones: solvers (SC20) and NLCG."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
from matplotlib.axes import Axes

from analysis.figures import captions, drawing
from analysis.figures.drawing import ArmStyle, Drawing, NothingToDraw
from analysis.figures.response import draw_response, final_metric, summaries, ticks
from analysis.metrics import finals
from analysis.published import provenance, published
from analysis.records.study import Study

BATCH_FIELDS = ("training.global_batch_size", "training.local_batch_size")


def draw_solvers(study: Study) -> Drawing:
    """Inverse against eigen: SGD and the solvers, beside SC20's runs."""
    runs = fixed_length_runs(study, *BATCH_FIELDS)
    if runs["global_batch_size"].nunique() < 2:
        raise NothingToDraw("no second batch size")
    solvers = dict(zip(study.cells["run"], study.cells["solver"].astype("object"), strict=True))
    used = {solver for solver in runs["run"].map(solvers) if isinstance(solver, str)}
    if len(used) < 2:
        raise NothingToDraw(f"no second solver beside {' and '.join(used) or 'none'}")
    table = published("sc20_cifar10")
    columns = {"SGD (SC20)": "SGD", "eigen (SC20)": "K-FAC eigen", "inverse (SC20)": "K-FAC inverse"}
    return accuracy_by_batch(study, runs, table, columns, "ResNet-32, CIFAR-10, 1 to 8 GPUs")


def draw_nlcg(study: Study) -> Drawing:
    """NLCG and first-order optimizers, beside the runs of arXiv:1812.02886."""
    runs = fixed_length_runs(study, *BATCH_FIELDS)
    if not (study.cells["optimizer"] == "nlcg").any():
        raise NothingToDraw("no arm with optimizer nlcg")
    if runs["global_batch_size"].nunique() < 2:
        raise NothingToDraw("no second batch size")
    names = ("NLCG", "RMSProp", "Momentum", "SGD")
    columns = {f"{name} (paper)": name for name in names}
    about = "ResNet-32, CIFAR-100, 200 epochs"
    return accuracy_by_batch(study, runs, published("nlcg_cifar100"), columns, about)


def fixed_length_runs(study: Study, *axis: str) -> pd.DataFrame:
    """Last evaluations of the runs that continue after their target, with their `series` over `axis`.

    Raises:
        NothingToDraw: there are no such runs.
    """
    names = dict(zip(study.cells["run"], study.series(*axis), strict=True))
    runs = finals(study)
    runs = runs[runs["fixed_length"]].assign(series=lambda rows: rows["run"].map(names))
    if runs.empty:
        raise NothingToDraw(
            "no run of fixed length (training.stop_at_target: false), and where a run stops at its target "
            "its last accuracy says no more than that"
        )
    return runs.reset_index(drop=True)


def accuracy_by_batch(
    study: Study, runs: pd.DataFrame, table: pd.DataFrame, columns: Mapping[str, str], about: str
) -> Drawing:
    """Own runs on the left, the published on the right.

    Args:
        study: for remarks.
        runs: rows of `fixed_length_runs`, at least two batch sizes.
        table: the published numbers, a row per batch size; empty for none.
        columns: column of `table` by its label.
        about: where the published numbers were measured.
    """
    looks = drawing.styles([*dict.fromkeys(runs["series"]), *columns])
    own = {name: looks[name] for name in dict.fromkeys(runs["series"])}
    metric = " / ".join(sorted(runs["metric"].unique()))
    quantity = final_metric(runs)
    figure, axes = drawing.panels(drawing.TWO_COLUMNS, 2.7, columns=1 if table.empty else 2)
    found = draw_response(axes[0], runs, "global_batch_size", quantity, own)
    axes[0].set_xlabel("global batch size (examples)")
    axes[0].set_title("this study", fontsize=8)
    entries = drawing.handles(own, lines=True)
    if not table.empty:
        theirs = {label: looks[label] for label in columns}
        _published(axes[1], table, columns, theirs)
        axes[1].set_title(f"published: {about}", fontsize=8)
        entries += drawing.handles(theirs, lines=True)
    drawing.legend_below(figure, entries, columns=min(len(entries), 4))
    epochs = sorted(runs["epochs"].unique())
    length = f"{epochs[0]:g}" if len(epochs) == 1 else f"{epochs[0]:g} to {epochs[-1]:g}"
    caption = drawing.sentence(
        f"Held-out {metric} after {length} epochs, all ranks' evaluation together, against the global batch.",
        f"Every run is a dot ({drawing.counts(runs, ('series', 'global_batch_size'))}), lines join medians.",
        captions.whiskers(found),
        f"Right: {about}, {provenance(table)}; another data set, to compare shapes, not heights."
        if not table.empty
        else "",
        captions.remarks(study, runs, star=""),
    )
    return Drawing(figure, summaries(runs, "global_batch_size", [quantity]), caption)


def _published(
    axis: Axes, table: pd.DataFrame, columns: Mapping[str, str], looks: Mapping[str, ArmStyle]
) -> None:
    for label, column in columns.items():
        values = pd.to_numeric(table[column])
        percent = values * 100 if values.max() <= 1 else values
        look = looks[label]
        fill = look.colour if table["printed"].all() else "white"
        axis.plot(range(len(percent)), percent, look.line, color=look.colour, linewidth=0.7)
        axis.plot(
            range(len(percent)), percent, look.marker, color=look.colour, markerfacecolor=fill, markersize=4
        )
    ticks(axis, list(table["global_batch_size"]))
    axis.set_xlabel("global batch size (examples)")
    axis.set_ylabel("top-1 accuracy (%)")
