"""One evaluation: metrics and mean training loss over all ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from harness.cell import Cell
from harness.training.precision import ModelPrecision
from harness.training.training_state import TrainingState
from harness.training.world import World, all_gather_bytes
from harness.workloads import WORKLOADS
from harness.workloads.workload import Pooled, Workload


@torch.no_grad()
def evaluate(
    cell: Cell, world: World, workload: Workload, state: TrainingState, precision: ModelPrecision
) -> tuple[dict[str, float], float]:
    """Metrics by name, and mean training loss since the last evaluation; a collective call."""
    state.model.eval()
    with precision.autocast():
        sums, count = workload.evaluate(state.model)
    names = sorted(sums)
    own = [*(sums[name] for name in names), count, float(state.loss_sum), state.loss_steps]
    totals = torch.tensor(own, dtype=torch.float64, device=world.device)
    world.communicator.all_reduce(totals)
    *metrics, examples, loss, loss_steps = totals.tolist()
    means = {name: metric / examples for name, metric in zip(names, metrics, strict=True)}
    if isinstance(workload, Pooled):
        means |= _pooled_metrics(world, workload)
    card = WORKLOADS[cell.workload.name]
    known = [metric for metric in card.metrics if card.follows.get(metric, metric) in means]
    return {metric: card.value(metric, means) for metric in known}, loss / loss_steps


def _pooled_metrics(world: World, workload: Pooled) -> Mapping[str, float]:
    """Metrics that rank 0 computes from the findings of all ranks, broadcast to all of them."""
    findings = all_gather_bytes(world.communicator, world.device, workload.findings())
    names = workload.pooled_metrics
    values = torch.zeros(len(names), dtype=torch.float64)
    if world.rank == 0:
        scores = workload.score(findings)
        values = torch.tensor([scores[name] for name in names], dtype=torch.float64)
    values = values.to(world.device)
    world.communicator.broadcast(values, 0)
    return dict(zip(names, values.tolist(), strict=True))
