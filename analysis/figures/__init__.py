"""The drawer of figures. To add one: a file here with `draw(study) -> Drawing`, and a line in `FIGURES`.

`tests/analysis/test_figures.py` covers it without an edit.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from analysis.figures import learning_curves, memory, phase_breakdown, scaling, time_to_accuracy
from analysis.figures.drawing import Draw, Drawing, NothingToDraw

__all__ = ["FIGURES", "Drawing", "FigureKind", "NothingToDraw"]


@dataclass(frozen=True)
class FigureKind:
    """A figure that any study of the right shape can fill."""

    title: str
    draw: Draw


FIGURES: Mapping[str, FigureKind] = MappingProxyType(
    {
        "time_to_accuracy": FigureKind("Time to accuracy", time_to_accuracy.draw),
        "learning_curves": FigureKind("Learning curves", learning_curves.draw),
        "scaling": FigureKind("Scaling", scaling.draw),
        "phase_breakdown": FigureKind("Where a step's time goes", phase_breakdown.draw),
        "memory": FigureKind("Memory", memory.draw),
    }
)
"""Figures in the order of the report."""
