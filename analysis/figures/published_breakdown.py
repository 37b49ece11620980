"""Where an iteration goes, beside SPD-KFAC's published breakdown: shares, because machines differ."""

from __future__ import annotations

from typing import Any

import pandas as pd

from analysis.figures import captions, drawing
from analysis.figures.drawing import Drawing, NothingToDraw
from analysis.figures.phase_styles import EDGE, phase_look, phase_patch
from analysis.metrics import IDENTITY, arm_order, in_order
from analysis.published import provenance, published
from analysis.records.study import Study
from analysis.steps import phase_costs

STAGES = {
    "forward and backward": (("forward", "backward"), "forward_backward_ms", "backward"),
    "gradient communication": (("gradient_comm",), "gradient_comm_ms", "gradient_comm"),
    "factor computation": (("factor_compute",), "factor_compute_ms", "factor_compute"),
    "factor communication": (("factor_comm",), "factor_comm_ms", "factor_comm"),
    "inverse computation": (("inverse_compute",), "inverse_compute_ms", "inverse_compute"),
    "inverse communication": (("inverse_comm", "precondition_comm"), "inverse_comm_ms", "inverse_comm"),
}
"""The paper's six parts: our phases, the column of the published table, the phase whose style is used."""


def draw(study: Study) -> Drawing:
    """A bar per arm at the largest judged world size, then a bar per published model and algorithm."""
    costs = phase_costs(study)
    measured = study.cells[study.cells["run"].isin(costs["run"])]
    kfac = measured[measured["strategy"].notna()]
    if kfac.empty:
        raise NothingToDraw("no K-FAC run has recorded a window of steps")
    size = captions.largest(kfac)
    where = captions.largest_words(kfac, size, "measured")
    numbers = measured[measured["world_size"] == size][IDENTITY].merge(costs, on="run")
    part_of = {phase: part for part, (phases, _, _) in STAGES.items() for phase in phases}
    numbers["part"] = numbers["phase"].map(part_of)
    numbers = in_order(study, numbers.dropna(subset="part"))
    own = numbers.groupby(["arm", "part"])["seconds_per_step"].sum().unstack(fill_value=0)
    own = own.reindex([arm for arm in arm_order(study) if arm in own.index])
    table = published("spd_kfac_breakdown")
    bars: list[tuple[str, Any]] = [(str(arm), own.loc[arm]) for arm in own.index]
    for row in table.to_dict("records"):
        parts = pd.Series({part: row[column] for part, (_, column, _) in STAGES.items()})
        bars.append((f"{row['model']}, {row['algorithm']}", parts))
    figure, (axis,) = drawing.panels(drawing.TWO_COLUMNS, 0.2 * len(bars) + 1.3, columns=1)
    for place, (_, parts) in enumerate(bars):
        left, gap = 0.0, 0.6 if place >= len(own) else 0.0
        for part, (_, _, look) in STAGES.items():
            share = float(parts.get(part, 0.0)) / float(parts.sum()) * 100
            colour, hatch = phase_look(look)
            axis.barh(-place - gap, share, 0.7, left, color=colour, hatch=hatch, **EDGE)
            left += share
    places = [-place - (0.6 if place >= len(own) else 0.0) for place in range(len(bars))]
    axis.set_yticks(places, [name for name, _ in bars], fontsize=6.5)
    axis.set_xlim(0, 100)
    axis.set_xlabel("share of these six parts of an iteration (%)")
    axis.grid(False)
    entries = [phase_patch(look, part) for part, (_, _, look) in STAGES.items()]
    drawing.legend_below(figure, entries, columns=3)
    caption = drawing.sentence(
        f"Upper bars: own arms on {where}: slowest rank, amortised; sums over runs",
        f"({drawing.counts(numbers)}). Inverse communication includes that of preconditioned gradients,",
        "which the paper's methods have none of. Lower bars: SPD-KFAC's breakdown on 64 GPUs, which updates",
        "factors and inverses in every step (F = E = 1), exposed time,",
        f"{provenance(table)}." if len(table) else "",
        "Shares, not times: models and machines differ.",
        captions.remarks(study, numbers, study.cells["world_size"] == size),
    )
    return Drawing(figure, numbers, caption)
