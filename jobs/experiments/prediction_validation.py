"""Every held-out world here, predicted from smaller ones: one figure, one table, one page.

    python -m jobs.experiments.prediction_validation results/prediction

Reads what `shaped_links.py` and `shaped_networks.py` measured, the archives `prediction-*.tar.xz` of the
sweeps in `jobs/sweeps/prediction/`, and the calibration of their machine. Writes `validation.md`, `.csv`,
`.png` and `.pdf`.
"""

from __future__ import annotations

import sys
from itertools import combinations
from pathlib import Path
from textwrap import fill

import matplotlib as mpl
import pandas as pd
from matplotlib.lines import Line2D

from analysis.cost_model.calibration_file import read_calibration
from analysis.figures import drawing, files
from analysis.figures.drawing import Drawing
from analysis.study_prediction.bounds import LEVEL
from analysis.study_prediction.links import from_calibration
from jobs.experiments.prediction_points import BASELINES, networks, perceptron, shaped, two_ranks

CALIBRATION = "two_cores.json"
GOAL, EXTRA_GOAL = 0.10, 0.15
_MODELS = ("error", *BASELINES)


def main(folder: Path) -> None:
    """Predict, compare, draw, write."""
    points = pd.DataFrame(_points(folder))
    files.save(_figure(points), folder, "validation")
    points.to_csv(folder / "validation.csv", index=False, float_format="%.4g", lineterminator="\n")
    (folder / "validation.md").write_text(_page(points), encoding="utf-8")


def _points(folder: Path) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    links = from_calibration(read_calibration(str(folder / CALIBRATION)))
    for archive in sorted(folder.glob("prediction-*.tar.xz")):
        name = archive.name.removeprefix("prediction-").removesuffix(".tar.xz")
        found += two_ranks(f"{name}, 2 ranks", archive, links)
    found += shaped("perceptron, 50 Mbit/s", perceptron(folder), (1, 2), (4,))
    for name, timed in networks(folder).items():
        found += shaped(f"resnet20, {name}", timed, (1, 2), (4, 8))
    return found


def _figure(points: pd.DataFrame) -> Drawing:
    """Predicted over measured, with bounds, by case."""
    cases = list(dict.fromkeys(points["case"]))
    looks = drawing.styles(cases)
    figure, (axis,) = drawing.panels(drawing.TWO_COLUMNS, 3.2, columns=1)
    with mpl.rc_context(drawing.STYLE):
        axis.axhspan(1 - GOAL, 1 + GOAL, color="#eeeeee", zorder=0)
        axis.axhline(1, color=drawing.GREY, linewidth=0.7)
        for place, row in enumerate(points.to_dict("records")):
            look = looks[row["case"]]
            low, middle, high = (
                row[key] / row["measured_ms"] for key in ("low_ms", "predicted_ms", "high_ms")
            )
            axis.plot([place, place], [low, high], color=look.colour, linewidth=0.8)
            filled = {} if row["world_size"] > 4 else {"mfc": "white"}
            axis.plot([place], [middle], look.marker, color=look.colour, markersize=4, **filled)
        axis.set_xticks(range(len(points)))
        axis.set_xticklabels(points["arm"], rotation=90)
        axis.set_xlim(-1, len(points))
        axis.set_ylabel("predicted over measured")
    handles = [*drawing.handles(looks), Line2D([], [], color=drawing.GREY, marker="o", linestyle="none",
               markersize=4, label="filled: 8 ranks")]  # fmt: skip
    drawing.legend_below(figure, handles, columns=3)
    caption = (
        f"Steps of held-out worlds: predicted over measured, with {LEVEL:.0%} bounds. Grey: within 10 %."
    )
    return Drawing(figure, points, caption)


def _page(points: pd.DataFrame) -> str:
    errors = points["error"].abs()
    covered = int(points["covered"].sum())
    new = points[~points["case"].str.startswith("perceptron")]
    lines = [
        "# Held-out worlds, predicted from smaller ones", "",
        "Written by `python -m jobs.experiments.prediction_validation results/prediction`.", "",
        f"**{int((errors <= GOAL).sum())} of {len(points)} steps are predicted within {GOAL:.0%}; mean error "
        f"{errors.mean():.1%}. The {LEVEL:.0%} bounds hold {covered} of {len(points)}** "
        f"({int(new['covered'].sum())} of {len(new)} without the perceptron, from which all bounds start).",
        "",
        "![Predicted over measured seconds of every held-out arm, with bounds](validation.png)", "",
        fill(_ABOUT, 150), "",
        fill(_BASELINES, 150), "",
        "| case | ranks | arms | within 10 % | in the bounds | " + " | ".join(("model", *BASELINES)) + " |",
        "|" + "---|" * (5 + len(_MODELS)),
    ]  # fmt: skip
    for (case, size), own in points.groupby(["case", "world_size"], sort=False):
        within = int((own["error"].abs() <= GOAL).sum())
        means = [own[name].abs().mean() for name in _MODELS]
        shown = ["" if pd.isna(mean) else f"{mean:.1%}" for mean in means]
        cells = [
            case,
            size,
            len(own),
            f"{within} of {len(own)}",
            f"{int(own['covered'].sum())} of {len(own)}",
            *shown,
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += ["", *_choices(points)]
    lines += ["", "Every point; the error of K-FAC's extra time is that of the difference to SGD's step:", "",
              "| case | ranks | arm | measured ms | predicted ms (bounds) | error | of the extra time |",
              "|" + "---|" * 7]  # fmt: skip
    for row in points.to_dict("records"):
        bounds = f"{row['predicted_ms']:.1f} ({row['low_ms']:.1f} to {row['high_ms']:.1f})"
        extra = "" if pd.isna(row["extra_error"]) else f"{row['extra_error']:+.0%}"
        cells = [row["case"], row["world_size"], row["arm"], f"{row['measured_ms']:.1f}", bounds,
                 f"{row['error']:+.1%}", extra]  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join([*lines, ""])


def _choices(points: pd.DataFrame) -> list[str]:
    """Whether predictions choose and order K-FAC's strategies as measurements do."""
    rows, right, always = [], 0, 0
    for (case, size), own in points[points["arm"] != "sgd"].groupby(["case", "world_size"], sort=False):
        arms = own.sort_values("measured_ms").to_dict("records")
        fastest, chosen = arms[0], min(arms, key=lambda arm: arm["predicted_ms"])
        behind, cost = (each["measured_ms"] / fastest["measured_ms"] for each in (arms[1], chosen))
        pairs = list(combinations(arms, 2))  # in the measured order
        ordered = sum(one["predicted_ms"] < other["predicted_ms"] for one, other in pairs)
        right += fastest["arm"] == chosen["arm"]
        always += fastest["arm"] == "dp_kfac"
        cells = [case, size, fastest["arm"], f"{behind:.2f}", chosen["arm"], f"{cost:.2f}",
                 f"{ordered} of {len(pairs)}"]  # fmt: skip
        rows.append("| " + " | ".join(map(str, cells)) + " |")
    text = (
        f"**K-FAC's strategy that is predicted fastest is the fastest measured in {right} of {len(rows)} "
        f"worlds**; to name dp_kfac always would be right in {always}. The table has how far behind the "
        "second was measured, what the predicted choice costs over the fastest, and how many pairs of "
        "strategies are predicted in the measured order."
    )
    head = "| case | ranks | fastest measured | second over it | predicted | over the fastest | pairs |"
    return [fill(text, 150), "", head, "|" + "---|" * 7, *rows]


_ABOUT = (
    "Two ranks: studies of the harness on one rank and two, a core each, 64 examples a rank, gradients "
    "overlapped with the backward pass; the step on two ranks follows from the windows of one rank, and "
    "from links that `kronscale calibrate` measured before. Limited links: real steps over Gloo, each "
    "rank in a network namespace of its own, predicted from the windows of 1 and 2 ranks alone. ResNet-20 "
    "has 100 Mbit/s and 8 examples a rank where links are the limit, 1,000 Mbit/s and 32 examples where "
    "CPUs are, and each rank a fifth of a CPU in every world, so that 8 ranks fit on two cores. F = 2, E "
    "= 4 there; F = 5, E = 10 in the studies."
)
_BASELINES = (
    "Mean error of a case, without sign. Simpler models are fitted to the same worlds: the largest known "
    "world repeated (`constant`), Amdahl's law, and Extra-P's normal form with a logarithm and with a "
    "line; from one world nothing can be fitted."
)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
