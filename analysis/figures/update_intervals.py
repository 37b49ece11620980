"""What stale second-order data costs in accuracy and saves in time: the update-interval study (SC20)."""

from __future__ import annotations

import pandas as pd
from matplotlib.lines import Line2D

from analysis.comparisons import points
from analysis.figures import captions, drawing
from analysis.figures.by_batch import fixed_length_runs
from analysis.figures.drawing import Drawing, NothingToDraw
from analysis.figures.response import Quantity, draw_response, final_metric, summaries
from analysis.metrics import kfac_cells
from analysis.records.study import Study

INTERVAL_FIELDS = ("kfac.inverse_update_steps", "kfac.factor_update_steps")


def draw(study: Study) -> Drawing:
    """Two panels over the inverse interval E; the first-order arm, which has none, is a horizontal line."""
    runs = fixed_length_runs(study, *INTERVAL_FIELDS)
    fields = ["inverse_update_steps", "factor_update_steps"]
    runs = runs.merge(study.cells[["run", *fields]], on="run")
    size = captions.largest(runs)
    where = captions.largest_words(runs, size, "with runs of fixed length")
    runs = runs[runs["world_size"] == size]
    flat = runs[~runs["run"].isin(study.cells["run"][kfac_cells(study)])]
    own = runs.dropna(subset=fields)
    scheduled = len(runs) - len(flat) - len(own)
    if own["inverse_update_steps"].nunique() < 2:
        raise NothingToDraw("no second interval of inverse updates")
    own = own.astype(dict.fromkeys(fields, "int64")).reset_index(drop=True)
    looks = drawing.styles([*dict.fromkeys(flat["series"]), *dict.fromkeys(own["series"])])
    kfac = {name: look for name, look in looks.items() if name in set(own["series"])}
    metric = " / ".join(sorted(own["metric"].unique()))
    quantities = (final_metric(own), Quantity("train_seconds", "training time (s)"))
    figure, axes = drawing.panels(drawing.TWO_COLUMNS, 2.6, columns=2)
    found = []
    for axis, quantity in zip(axes, quantities, strict=True):
        found += draw_response(axis, own, "inverse_update_steps", quantity, kfac)
        for name, _, group in points(flat.assign(arm=flat["series"])):
            middle = group[quantity.column].median() * quantity.factor
            axis.axhline(middle, color=looks[name].colour, linestyle=":", linewidth=1)
        axis.set_xlabel("steps between inverse updates (E)")
    axes[1].set_ylim(bottom=0)
    levels = [
        Line2D([], [], color=looks[name].colour, linestyle=":", label=f"{name} (median)")
        for name in dict.fromkeys(flat["series"])
    ]
    drawing.legend_below(figure, [*drawing.handles(kfac, lines=True), *levels], columns=min(len(looks), 4))
    pairs = own[fields].drop_duplicates().sort_values(fields).itertuples(index=False)
    caption = drawing.sentence(
        f"{metric.capitalize()} and training time after {own['epochs'].max():g} epochs as second-order data",
        f"is renewed less often, on {where}; factors are updated every F steps, inverses every E:",
        ", ".join(f"E={e} F={f}" for e, f in pairs) + ".",
        f"Every run is a dot ({drawing.counts(own, ('series', 'inverse_update_steps'))}).",
        captions.whiskers(found),
        "Training time is the slowest rank's clock."
        + ("" if len(flat) else " No first-order arm to compare."),
        f"{scheduled} runs whose intervals change over time have no one E and are not drawn."
        if scheduled
        else "",
        captions.remarks(study, pd.concat([own, flat]), study.cells["world_size"] == size),
    )
    return Drawing(figure, summaries(own, "inverse_update_steps", quantities), caption)
