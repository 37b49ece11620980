"""How a phase looks in every figure: compute is plain, communication is hatched in its stage's colour."""

from __future__ import annotations

from typing import Any

from matplotlib.patches import Patch

LOOKS = {
    "data": ("#BBBBBB", "...."), "forward": ("#DDDDDD", ""), "backward": ("#999999", ""),
    "gradient_comm": ("#56B4E9", "////"), "factor_compute": ("#F0E442", ""),
    "factor_comm": ("#F0E442", "////"),
    "inverse_compute": ("#D55E00", ""), "inverse_comm": ("#D55E00", "////"), "precondition": ("#009E73", ""),
    "precondition_comm": ("#009E73", "////"), "scale": ("#CC79A7", ""), "update": ("#0072B2", ""),
    "other": ("#FFFFFF", "xxxx"),
}  # fmt: skip
"""Colour and hatch of each phase."""

EDGE: Any = {"edgecolor": "#222222", "linewidth": 0.4}


def phase_look(phase: str) -> tuple[str, str]:
    """Colour and hatch of a phase; `forward_backward` of published tables looks like `backward`."""
    return LOOKS.get("backward" if phase == "forward_backward" else phase, ("#FFFFFF", "++++"))


def phase_patch(phase: str, label: str = "") -> Patch:
    """A legend entry, labelled with the phase unless a `label` is given."""
    colour, hatch = phase_look(phase)
    return Patch(facecolor=colour, hatch=hatch, label=label or phase.replace("_", " "), **EDGE)
