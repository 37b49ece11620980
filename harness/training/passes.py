"""How the model is run: in which precision, in micro-batches, and over the held-out examples."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from harness.cell import Cell, Precision
from harness.errors import SiteError
from harness.training.training_state import TrainingState
from harness.training.world import World, all_gather_bytes
from harness.workloads import WORKLOADS
from harness.workloads.workload import Batch, Pooled, Workload


class ModelPrecision:
    """Sets torch's precision of products for this process, and provides the model's autocast.

    Args:
        precision: `float32` computes all products in float32, also convolutions, for which torch uses a
            GPU's TF32 units by default; `tf32` uses those units for every product but K-FAC's; `bfloat16` is
            autocast: weights, gradients, K-FAC and the optimizer stay float32.

    Raises:
        SiteError: `tf32` without a GPU, where it would be float32.
    """

    def __init__(self, precision: Precision, device: torch.device) -> None:
        if precision == "tf32" and device.type != "cuda":
            raise SiteError(
                f"training.precision=tf32 needs a GPU, and this rank computes on {device.type}; "
                "use float32 or bfloat16"
            )
        self._precision, self._device = precision, device
        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
        torch.backends.cudnn.allow_tf32 = precision == "tf32"

    def autocast(self) -> AbstractContextManager[Any]:
        """A context for forward passes; autograd uses the same precision in the backward pass."""
        return torch.autocast(self._device.type, torch.bfloat16, enabled=self._precision == "bfloat16")


@runtime_checkable
class CutsBatches(Protocol):
    """A workload that cuts its batches itself, because more than their examples depends on the cut."""

    def micro_batches(self, batch: Batch, count: int) -> list[Batch]:
        """Equal parts of a local batch, the mean of whose losses is the loss of the batch."""
        ...


def micro_batches(workload: Workload, batch: Batch, count: int) -> list[Batch]:
    """`count` equal parts of a local batch, in its order; tensors and lists are cut along their examples."""
    if count == 1:
        return [batch]
    if isinstance(workload, CutsBatches):
        return workload.micro_batches(batch, count)
    return [part(batch, number, count) for number in range(count)]


def part(batch: Any, number: int, count: int) -> Any:
    """Part `number` of `count` of a tensor or list of examples, or of each in a tuple.

    Raises:
        TypeError: it is none of these.
        ValueError: its examples cannot be cut into equal parts.
    """
    if isinstance(batch, tuple):
        return tuple(part(each, number, count) for each in batch)
    if not isinstance(batch, Tensor | list):
        raise TypeError(f"a batch must consist of tensors and lists, got a {type(batch).__name__}")
    examples, rest = divmod(len(batch), count)
    if rest:
        raise ValueError(f"{len(batch)} examples cannot be cut into {count} equal parts")
    return batch[number * examples : (number + 1) * examples]


@torch.no_grad()
def evaluate(
    cell: Cell, world: World, workload: Workload, state: TrainingState, precision: ModelPrecision
) -> tuple[Mapping[str, float], float]:
    """The workload's metrics, and mean training loss since the last evaluation; a collective call."""
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
    return WORKLOADS[cell.workload.name].values(means), loss / loss_steps


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
