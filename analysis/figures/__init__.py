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
        question: what it answers.
    """

    title: str
    drawn: Draw
    question: str

    def draw(self, study: Study) -> Drawing:
        """Draw a study, in the same style on every machine.

        Raises:
            NothingToDraw: the study has nothing to show here.
        """
        with in_style():
            return self.drawn(study)


FIGURES: Mapping[str, FigureKind] = MappingProxyType(
    {
        "time_to_accuracy": FigureKind(
            "Time to accuracy",
            time_to_accuracy.draw,
            "Which method reaches the target sooner: by fewer epochs, or by cheaper ones?",
        ),
        "energy_to_accuracy": FigureKind(
            "Energy to accuracy", energy_to_accuracy.draw, "How much energy does the target take?"
        ),
        "claims": FigureKind(
            "Time saved, beside the papers' claims",
            claims.draw,
            "How much time is saved, beside what the papers claim?",
        ),
        "break_even": FigureKind(
            "Epochs saved against the cost of an epoch",
            break_even.draw,
            "How many epochs must be saved before a dearer epoch pays?",
        ),
        "learning_curves": FigureKind(
            "Learning curves",
            learning_curves.draw,
            "How does the target's metric rise, by epoch and by second?",
        ),
        "other_metrics": FigureKind(
            "The other metrics",
            learning_curves.draw_other_metrics,
            "What do the workload's other metrics do?",
        ),
        "loss_curves": FigureKind(
            "Training loss", learning_curves.draw_losses, "How does the training loss fall?"
        ),
        "accuracy_by_world_size": FigureKind(
            "Accuracy by world size",
            accuracy_by_world_size.draw,
            "Does the accuracy keep up as ranks are added?",
        ),
        "solver_by_batch": FigureKind(
            "Inverse against eigen by batch size",
            by_batch.draw_solvers,
            "Eigen or inverse, as the batch grows?",
        ),
        "nlcg_by_batch": FigureKind(
            "NLCG by batch size", by_batch.draw_nlcg, "How far does the batch grow with NLCG?"
        ),
        "update_intervals": FigureKind(
            "Update intervals", update_intervals.draw, "How seldom may factors and inverses be updated?"
        ),
        "damping_interval": FigureKind(
            "Damping and inverse interval", damping_interval.draw, "Which damping goes with which interval?"
        ),
        "scaling": FigureKind("Scaling", scaling.draw, "What do more ranks save?"),
        "phase_breakdown": FigureKind(
            "Where a step's time goes", phase_breakdown.draw, "Where does a step's time go, phase by phase?"
        ),
        "published_breakdown": FigureKind(
            "Breakdown beside SPD-KFAC's",
            published_breakdown.draw,
            "How far is the breakdown from SPD-KFAC's?",
        ),
        "stage_profile": FigureKind(
            "Stage profile", stage_profile.draw, "What does each stage of K-FAC cost as ranks are added?"
        ),
        "wait_transfer": FigureKind(
            "Waiting and moving",
            wait_transfer.draw,
            "Does a collective take its time by moving bytes, or by waiting for a late rank?",
        ),
        "eigen_imbalance": FigureKind(
            "Imbalance of inverse workers",
            eigen_imbalance.draw,
            "How unequal is the work of the inverse workers?",
        ),
        "fraction": FigureKind("Gradient worker fraction", fraction.draw, "Which gradient worker fraction?"),
        "memory": FigureKind("Memory", memory.draw, "What does each rank keep?"),
        "memory_budget": FigureKind(
            "Fixed memory budget", memory_budget.draw, "Which settings fit a memory budget?"
        ),
        "pareto": FigureKind(
            "Time against memory", pareto.draw, "Which settings are best in time and memory at once?"
        ),
        "factor_sizes": FigureKind("Factor sizes", factor_sizes.draw, "How large are the factors?"),
        "placement_grid": FigureKind("Placement", placement_grid.draw, "Which rank does what?"),
    }
)
"""Figures in the order of the report."""
