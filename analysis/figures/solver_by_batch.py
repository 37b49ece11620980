"""Inverse against eigen: accuracy by batch size for SGD and the solvers (SC20)."""

from __future__ import annotations

from analysis.figures.by_batch import BATCH_FIELDS, accuracy_by_batch, fixed_length_runs
from analysis.figures.drawing import Drawing, NothingToDraw
from analysis.published import published
from analysis.records.study import Study


def draw(study: Study) -> Drawing:
    """Own runs beside SC20's."""
    runs = fixed_length_runs(study, *BATCH_FIELDS)
    if runs["global_batch_size"].nunique() < 2:
        raise NothingToDraw("no second batch size")
    solvers = dict(zip(study.cells["run"], study.cells["solver"].astype("object"), strict=True))
    used = {solver for solver in runs["run"].map(solvers) if isinstance(solver, str)}
    if len(used) < 2:
        raise NothingToDraw(f"no second solver beside {' and '.join(used) or 'none'}")
    table = published("sc20_cifar10")
    columns = {"SGD (SC20)": "SGD", "eigen (SC20)": "K-FAC eigen", "inverse (SC20)": "K-FAC inverse"}
    return accuracy_by_batch(study, runs, table, columns, "ResNet-32, CIFAR-10, 1 to 8 GPUs")
