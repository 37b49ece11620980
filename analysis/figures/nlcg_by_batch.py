"""Accuracy against batch size for NLCG and first-order optimizers (NLCG, arXiv:1812.02886)."""

from __future__ import annotations

from analysis.figures.by_batch import BATCH_FIELDS, accuracy_by_batch, fixed_length_runs
from analysis.figures.drawing import Drawing, NothingToDraw
from analysis.published import published
from analysis.records.study import Study


def draw(study: Study) -> Drawing:
    """Own runs beside the paper's."""
    runs = fixed_length_runs(study, *BATCH_FIELDS)
    if not (study.cells["optimizer"] == "nlcg").any():
        raise NothingToDraw("no arm with optimizer nlcg")
    if runs["global_batch_size"].nunique() < 2:
        raise NothingToDraw("no second batch size")
    names = ("NLCG", "RMSProp", "Momentum", "SGD")
    columns = {f"{name} (paper)": name for name in names}
    about = "ResNet-32, CIFAR-100, 200 epochs"
    return accuracy_by_batch(study, runs, published("nlcg_cifar100"), columns, about)
