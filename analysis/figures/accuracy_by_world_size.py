"""Accuracy by number of ranks for SGD and K-FAC (SC20's accuracy by GPU count)."""

from __future__ import annotations

from analysis.figures import captions, drawing
from analysis.figures.by_batch import fixed_length_runs
from analysis.figures.drawing import Drawing, NothingToDraw
from analysis.figures.response import draw_response, final_metric, summaries, ticks
from analysis.published import provenance, published
from analysis.records.study import Study

PUBLISHED = {"SGD (SC20)": "SGD", "K-FAC (SC20)": "K-FAC eigen"}


def draw(study: Study) -> Drawing:
    """Own runs beside SC20's; those numbers are recalled, so their markers are hollow."""
    runs = fixed_length_runs(study)
    if runs["world_size"].nunique() < 2:
        raise NothingToDraw("no second world size")
    table = published("sc20_cifar10")
    own = drawing.styles(runs["series"])
    metric = " / ".join(sorted(runs["metric"].unique()))
    quantity = final_metric(runs)
    width = drawing.ONE_COLUMN if table.empty else drawing.TWO_COLUMNS
    figure, axes = drawing.panels(width, 2.6, columns=1 if table.empty else 2)
    found = draw_response(axes[0], runs, "world_size", quantity, own)
    axes[0].set_xticklabels(list(drawing.world_size_labels(runs).values()))
    axes[0].set_xlabel("ranks")
    axes[0].set_title("this study", fontsize=8)
    entries = drawing.handles(own, lines=True)
    if not table.empty:
        theirs = {
            name: look for name, look in drawing.styles([*own, *PUBLISHED]).items() if name in PUBLISHED
        }
        for name, look in theirs.items():
            axes[1].plot(
                range(len(table)), table[PUBLISHED[name]], look.line, marker=look.marker, color=look.colour,
                markerfacecolor="white", markersize=4, linewidth=0.7,
            )  # fmt: skip
        ticks(axes[1], list(table["gpus"]))
        axes[1].set_xlabel("GPUs")
        axes[1].set_ylabel("top-1 accuracy (%)")
        axes[1].set_title("published: ResNet-32, CIFAR-10", fontsize=8)
        entries += drawing.handles(theirs, lines=True)
    drawing.legend_below(figure, entries, columns=min(len(entries), 4))
    batches = runs.groupby("world_size")["global_batch_size"].agg(["min", "max"])
    grows = "fixed" if batches["max"].nunique() == 1 else "growing with the ranks"
    caption = drawing.sentence(
        f"Held-out {metric} after a fixed number of epochs by number of ranks, global batch {grows}.",
        f"Every run is a dot ({drawing.counts(runs, ('series', 'world_size'))}), lines join medians.",
        captions.whiskers(found),
        f"Right: SC20, {provenance(table)}; another data set." if not table.empty else "",
        captions.remarks(study, runs, star=captions.STARRED),
    )
    return Drawing(figure, summaries(runs, "world_size", [quantity]), caption)
