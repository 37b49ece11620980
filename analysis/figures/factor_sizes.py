"""Factor sizes of a model, and which factors dominate the inverse time (TPDS22, DP-KFAC)."""

from __future__ import annotations

import pandas as pd
from matplotlib.ticker import FuncFormatter, MaxNLocator

from analysis.figures import captions, drawing
from analysis.figures.drawing import Drawing, NothingToDraw
from analysis.metrics import IDENTITY, in_order, kfac_cells
from analysis.placements import factor_sizes
from analysis.records.study import Study


def draw(study: Study) -> Drawing:
    """Left: factors in order of size. Right: the share of n³ that the largest of them hold."""
    sizes = factor_sizes(study)
    if sizes.empty:
        raise NothingToDraw("no K-FAC run has described its layers")
    numbers = in_order(study, study.cells[[*IDENTITY, "workload"]].merge(sizes, on="run"))
    numbers["model"] = numbers["run"].map(_models(study, numbers))
    first = numbers.drop_duplicates("model")["run"]
    shown = numbers[numbers["run"].isin(first)].reset_index(drop=True)
    looks = drawing.styles(f"{model}: {factor}" for model in dict.fromkeys(shown["model"]) for factor in "AG")
    figure, (left, right) = drawing.panels(drawing.TWO_COLUMNS, 2.6, columns=2)
    for model, rows in shown.groupby("model", sort=False):
        for factor, own in rows.groupby("factor"):
            dims = own["dim"].sort_values(ascending=False)
            look = looks[f"{model}: {factor}"]
            left.plot(range(1, len(dims) + 1), dims, look.line, marker=look.marker, markersize=3,
                      color=look.colour, linewidth=0.8)  # fmt: skip
        cubes = (rows["blocks"] * rows["dim"] ** 3).sort_values(ascending=False)
        look = looks[f"{model}: A"]
        shares = cubes.cumsum() / cubes.sum() * 100
        right.plot(range(1, len(shares) + 1), shares, look.line, marker=look.marker,
                   markersize=3, color=look.colour, linewidth=0.8)  # fmt: skip
    left.set_yscale("log", base=2)
    left.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    for axis in (left, right):
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    left.set_ylabel("size n of an n × n factor")
    left.set_xlabel("factors, largest first")
    right.set_ylabel("share of all factors' n³ (%)")
    right.set_xlabel("A and G factors, most work first")
    right.set_ylim(0, 103)
    drawing.legend_below(figure, drawing.handles(looks, lines=True), columns=min(len(looks), 4))
    models = "; ".join(
        f"{model}: {len(rows)} factors, n from {rows['dim'].min():g} to {rows['dim'].max():g}"
        for model, rows in shown.groupby("model", sort=False)
    )
    caption = drawing.sentence(
        f"Sizes of the Kronecker factors, exact, as the runs described them (n = {shown['run'].nunique()}:",
        f"one run per model, because all runs of a model have the same). {models}. n³ stands for the",
        "work of inverting.",
        captions.remarks(study, numbers, kfac_cells(study), star=""),
    )
    return Drawing(figure, shown, caption)


def _models(study: Study, numbers: pd.DataFrame) -> dict[str, str]:
    """A name for every distinct list of layers: the workload's, with the options that tell models apart."""
    lists = {
        str(run): tuple(zip(rows["name"], rows["factor"], rows["dim"], strict=True))
        for run, rows in numbers.groupby("run")
    }
    options = [str(path) for path in study.fields.columns if str(path).startswith("workload.options.")]
    varying = {path: study.value_of(path) for path in options if study.value_of(path).nunique() > 1}
    words = study.cells["workload"].copy()
    for path, values in varying.items():
        words += " " + path.rpartition(".")[2] + "=" + values.astype("str")
    name_of = dict(zip(study.cells["run"], words, strict=True))
    named: dict[object, str] = {}
    for run, layers in lists.items():
        named.setdefault(layers, name_of[run])
    return {run: named[layers] for run, layers in lists.items()}
