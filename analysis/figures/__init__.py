"""The registry of figures. To add one: a file here with `draw(study) -> Drawing`, and a line in `FIGURES`.

`tests/analysis/test_figures.py` covers it without an edit.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from analysis.figures import (
    accuracy_by_world_size,
    break_even,
    by_batch,
    claims,
    damping_interval,
    eigen_imbalance,
    energy_to_accuracy,
    factor_sizes,
    fraction,
    learning_curves,
    memory,
    memory_budget,
    pareto,
    phase_breakdown,
    placement_grid,
    published_breakdown,
    scaling,
    stage_profile,
    time_to_accuracy,
    update_intervals,
    wait_transfer,
)
from analysis.figures.drawing import Draw, Drawing, NothingToDraw, in_style
from analysis.records.study import Study

__all__ = ["FIGURES", "Drawing", "FigureKind", "NothingToDraw"]


@dataclass(frozen=True)
class FigureKind:
    """A registered figure.

    Attributes:
        title: its heading on a page.
        drawn: the function that draws a study.
    """

    title: str
    drawn: Draw

    def draw(self, study: Study) -> Drawing:
        """Draw a study, in the same style on every machine.

        Raises:
            NothingToDraw: the study has nothing to show here.
        """
        with in_style():
            return self.drawn(study)


FIGURES: Mapping[str, FigureKind] = MappingProxyType(
    {
        "time_to_accuracy": FigureKind("Time to accuracy", time_to_accuracy.draw),
        "energy_to_accuracy": FigureKind("Energy to accuracy", energy_to_accuracy.draw),
        "claims": FigureKind("Time saved, beside the papers' claims", claims.draw),
        "break_even": FigureKind("Epochs saved against the cost of an epoch", break_even.draw),
        "learning_curves": FigureKind("Learning curves", learning_curves.draw),
        "other_metrics": FigureKind("The other metrics", learning_curves.draw_other_metrics),
        "loss_curves": FigureKind("Training loss", learning_curves.draw_losses),
        "accuracy_by_world_size": FigureKind("Accuracy by world size", accuracy_by_world_size.draw),
        "solver_by_batch": FigureKind("Inverse against eigen by batch size", by_batch.draw_solvers),
        "nlcg_by_batch": FigureKind("NLCG by batch size", by_batch.draw_nlcg),
        "update_intervals": FigureKind("Update intervals", update_intervals.draw),
        "damping_interval": FigureKind("Damping and inverse interval", damping_interval.draw),
        "scaling": FigureKind("Scaling", scaling.draw),
        "phase_breakdown": FigureKind("Where a step's time goes", phase_breakdown.draw),
        "published_breakdown": FigureKind("Breakdown beside SPD-KFAC's", published_breakdown.draw),
        "stage_profile": FigureKind("Stage profile", stage_profile.draw),
        "wait_transfer": FigureKind("Waiting and moving", wait_transfer.draw),
        "eigen_imbalance": FigureKind("Imbalance of inverse workers", eigen_imbalance.draw),
        "fraction": FigureKind("Gradient worker fraction", fraction.draw),
        "memory": FigureKind("Memory", memory.draw),
        "memory_budget": FigureKind("Fixed memory budget", memory_budget.draw),
        "pareto": FigureKind("Time against memory", pareto.draw),
        "factor_sizes": FigureKind("Factor sizes", factor_sizes.draw),
        "placement_grid": FigureKind("Placement", placement_grid.draw),
    }
)
"""Figures in the order of the report."""
