"""Step time and memory against the share of ranks that precondition a layer (KAISA)."""

from __future__ import annotations

import pandas as pd

from analysis.figures import captions, drawing
from analysis.figures.drawing import Drawing, NothingToDraw
from analysis.figures.response import Quantity, draw_response, summaries
from analysis.metrics import IDENTITY, in_order
from analysis.records.study import Study
from analysis.steps import kfac_bytes, run_speeds
from harness.runs.arms import ARM_SECTIONS

QUANTITIES = (
    Quantity("seconds_per_step", "time per step (ms)", 1e3),
    Quantity("kfac_bytes", "K-FAC memory, largest rank (MB)", 1e-6),
)

_ON_THE_AXIS = ("kfac.strategy", "kfac.grad_worker_fraction")


def draw(study: Study) -> Drawing:
    """COMM-OPT is fraction 1 and MEM-OPT one rank's share, so all three strategies lie on one axis."""
    cells = study.cells
    family = cells["strategy"].isin(["comm_opt", "mem_opt", "hybrid_opt"]) & (cells["world_size"] > 1)
    fraction = cells["grad_worker_fraction"].astype("float64")
    fraction = fraction.mask(cells["strategy"] == "comm_opt", 1.0)
    fraction = fraction.mask(cells["strategy"] == "mem_opt", 1 / cells["world_size"])
    runs = cells[IDENTITY].assign(fraction=fraction)[family]
    runs = runs.merge(run_speeds(study), on="run").merge(kfac_bytes(study), on="run", how="left")
    runs = in_order(study, runs.dropna(subset="fraction"))
    runs["rest"] = _other_settings(study, runs)
    several = runs.groupby(["world_size", "setting", "rest"])["fraction"].transform("nunique") > 1
    runs = runs[several].reset_index(drop=True)
    if runs.empty:
        raise NothingToDraw("no second gradient worker fraction on the same number of ranks")
    settings = runs["setting"].nunique() > 1
    labels = {size: drawing.ranks_label(int(str(size)), own) for size, own in runs.groupby("world_size")}
    runs["series"] = runs["world_size"].map(labels) + (" " + runs["setting"] if settings else "")
    if runs["rest"].nunique() > 1:
        runs["series"] += " " + _other_settings(study, runs)
    looks = drawing.styles(runs.sort_values("world_size")["series"])
    figure, axes = drawing.panels(drawing.TWO_COLUMNS, 2.6, columns=2)
    found = []
    for axis, quantity in zip(axes, QUANTITIES, strict=True):
        found += draw_response(axis, runs, "fraction", quantity, looks)
        axis.set_xlabel("gradient worker fraction")
        axis.set_ylim(bottom=0)
    drawing.legend_below(figure, drawing.handles(looks, lines=True), columns=min(len(looks), 4))
    methods = ", ".join(dict.fromkeys(runs["arm"]))
    caption = drawing.sentence(
        "Time per step (slowest rank, amortised over inverse periods) and K-FAC's state on the rank that",
        f"holds most, against the share of ranks that precondition a layer, for {methods}. Every run is a",
        f"dot ({drawing.counts(runs, ('series', 'fraction'))}). 1 MB = 1e6 bytes.",
        captions.whiskers(found),
        captions.remarks(study, runs, family),
    )
    numbers: pd.DataFrame = summaries(runs, "fraction", QUANTITIES)
    return Drawing(figure, numbers, caption)


def _other_settings(study: Study, runs: pd.DataFrame) -> pd.Series:
    """The settings of optimizer and K-FAC, beside strategy and fraction, that differ between these runs.

    Only runs that agree in them share a curve, so that no other effect is taken for the fraction's.
    """
    fields = study.fields.set_index("run").loc[runs["run"].astype("str").tolist()].astype("str")
    paths = [path for path in map(str, fields) if path.partition(".")[0] in ARM_SECTIONS]
    varying = [path for path in paths if path not in _ON_THE_AXIS and fields[path].nunique() > 1]
    words = [path.rpartition(".")[2] + "=" + fields[path] for path in varying]
    spelled = [" ".join(parts) for parts in zip(*words, strict=True)] if words else [""] * len(runs)
    return pd.Series(spelled, index=runs.index, dtype="str")
