"""The model that is measured: one replica on a fixed batch, and its K-FAC steps of each kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from harness.workloads.models import resnet32, resnet50
from kfac_core import KFAC, KFACConfig
from kfac_core.collectives import connect
from kfac_core.phases import COMM_PHASES, Phase
from kfac_core.timing import PhaseTimer


@dataclass(frozen=True)
class Model:
    """A network and its synthetic batch: shape of one example, number of classes, examples."""

    build: Callable[[], nn.Module]
    example: tuple[int, ...]
    classes: int
    batch: int


MODELS: Mapping[str, Model] = {
    "resnet32": Model(resnet32, (3, 32, 32), 10, 128),
    "resnet50": Model(resnet50, (3, 64, 64), 1000, 8),
}

FACTOR_STEPS, INVERSE_STEPS = 10, 100
KINDS: Mapping[str, int] = {"full": 0, "factor": FACTOR_STEPS, "plain": 1}
"""Kinds of step, each with a step number at which it is due: all work, factors only, preconditioning only."""


class Training:
    """One replica of a model on a fixed batch; gradients are averaged by DistributedDataParallel."""

    def __init__(self, model: Model, batch: int, rank: int, world_size: int) -> None:
        torch.manual_seed(0)
        bare = model.build()
        self.model: nn.Module = DistributedDataParallel(bare) if world_size > 1 else bare
        self.model.train()
        generator = torch.Generator().manual_seed(1 + rank)
        self._inputs = torch.randn(batch, *model.example, generator=generator)
        self._labels = torch.randint(0, model.classes, (batch,), generator=generator)
        self._world_size = world_size

    def loss(self) -> Tensor:
        """The loss of one forward pass."""
        return functional.cross_entropy(self.model(self._inputs), self._labels)

    def synchronize(self) -> None:
        """Clear the gradients and wait for the other ranks, so that a late rank is not measured."""
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        if self._world_size > 1:
            dist.barrier()


class Preconditioned:
    """A replica with K-FAC and a phase timer.

    Attributes:
        calls: collectives by phase of the last full step.
    """

    def __init__(self, training: Training, config: KFACConfig) -> None:
        self.calls: dict[str, int] = {}
        self._training = training
        communicator = connect()
        self._timer = PhaseTimer(traffic=communicator.traffic)
        self.kfac = KFAC(training.model, config, lr=0.1, timer=self._timer, communicator=communicator)

    def step(self, kind: str) -> dict[str, float]:
        """One iteration of `kind`, with neither optimizer nor data; seconds by phase and in `total`."""
        self._run(kind)
        totals = self._timer.drain()
        if kind == "full":
            self.calls = {phase.value: totals.calls.get(phase.value, 0) for phase in COMM_PHASES}
        return {"total": totals.wall_seconds, **totals.seconds}

    def _run(self, kind: str) -> None:
        self.kfac.steps = KINDS[kind]
        self._training.synchronize()
        self._timer.start()
        with self._timer.phase(Phase.FORWARD):
            loss = self._training.loss()
        with self._timer.phase(Phase.BACKWARD):
            loss.backward()
        self.kfac.step()
        self._timer.stop()
