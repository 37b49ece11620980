"""K-FAC in front of any optimizer: the phases of a step, in order, on one page."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from kfac_core.capture import Capture
from kfac_core.collectives import Communicator, connect
from kfac_core.config import KFACConfig
from kfac_core.errors import ConfigError
from kfac_core.factors import Factors
from kfac_core.gradients import Gradients
from kfac_core.layers import find_layers
from kfac_core.phases import Phase
from kfac_core.placement import Placement
from kfac_core.second_order import SecondOrder
from kfac_core.solvers import SOLVERS
from kfac_core.strategies import place
from kfac_core.timer import PhaseTimer


class KFAC:
    """Replaces the gradients of Linear and Conv2d layers by F^-1 times the gradient, F Kronecker-factored.

    Call `step()` after the gradients are averaged over ranks and before the optimizer's own step. The loss
    must be a mean over the local batch. Layers of other kinds keep their averaged gradient.

    Args:
        model: the model, or its DistributedDataParallel wrapper.
        config: hyperparameters and distribution strategy.
        lr: the learning rate that kl-clip bounds the step with: a number, a callable without arguments, or
            the optimizer whose first parameter group has it.
        timer: books the time and traffic of each phase; a fresh one by default.
        communicator: the ranks; torch.distributed's world by default, a world of one without it.

    Attributes:
        placement: who computes what; `print(kfac.placement)` draws the grid of the KAISA paper.
        steps: calls of `step()` so far.

    Raises:
        ConfigError: the model has no layer that K-FAC supports, or all of them are skipped.
        PlacementError: the strategy cannot divide this world.

    Source: Pauloski et al., "Convolutional neural network training with distributed K-FAC", SC20;
    Pauloski et al., "KAISA", SC21; Zhang et al., "Scalable K-FAC training with distributed preconditioning".
    """

    def __init__(
        self,
        model: nn.Module,
        config: KFACConfig | None = None,
        *,
        lr: float | Callable[[], float] | Optimizer,
        timer: PhaseTimer | None = None,
        communicator: Communicator | None = None,
    ) -> None:
        self.config = config if config is not None else KFACConfig()
        self.steps = 0
        self._lr = _read_lr(lr)
        self._communicator = communicator if communicator is not None else connect()
        self._timer = timer if timer is not None else PhaseTimer()
        self._layers = find_layers(_bare(model), self.config.skip)
        if not self._layers:
            raise ConfigError(f"{type(model).__name__} has no trainable layer to precondition")
        shapes = [layer.shape for layer in self._layers]
        world_size = self._communicator.world_size
        self.placement: Placement = place(self.config, shapes, world_size)
        weight = self._layers[0].weight
        dtype = torch.promote_types(weight.dtype, torch.float32)  # half precision cannot hold a running mean
        like = weight.new_empty(0, dtype=dtype)
        self._solver = SOLVERS[self.config.solver]
        self._factors = Factors(shapes, self.placement, self._communicator, like)
        self._second_order = SecondOrder(shapes, self.placement, self._communicator, self._solver, like)
        self._gradients = Gradients(self._layers, self.placement, self._communicator, like)
        self._capture = Capture(
            self._layers,
            dtype,
            listening=lambda: self.steps % self.config.factor_update_steps == 0,
            measured=lambda: self._timer.phase(Phase.FACTOR_COMPUTE),
        )

    @torch.no_grad()
    def step(self) -> None:
        """Precondition the gradients in place; on update steps renew factors and second-order data first."""
        if self.steps % self.config.factor_update_steps == 0:
            self._update_factors()
        if self.steps % self.config.inverse_update_steps == 0:
            self._update_second_order()
        self._precondition()
        self.steps += 1

    def memory(self) -> dict[str, int]:
        """Bytes of K-FAC state on this rank: running factors, second-order data, gradient buffers."""
        factors = sum(factor.numel() * factor.element_size() for factor in self._factors.running.values())
        return {
            "factors": factors,
            "second_order": self._second_order.nbytes(),
            "buffers": self._gradients.nbytes(),
        }

    def remove(self) -> None:
        """Take K-FAC's hooks off the model."""
        self._capture.remove()

    def _update_factors(self) -> None:
        statistics = self._capture.statistics
        with self._timer.phase(Phase.FACTOR_COMM):
            self._factors.exchange(statistics)
        with self._timer.phase(Phase.FACTOR_COMPUTE):
            self._factors.absorb(statistics, self.config.factor_decay)
            self._capture.clear()

    def _update_second_order(self) -> None:
        factors = self._factors.running
        with self._timer.phase(Phase.INVERSE_COMM):
            self._second_order.exchange_means(factors)
        with self._timer.phase(Phase.INVERSE_COMPUTE):
            self._second_order.solve(factors, self.config.damping)
        with self._timer.phase(Phase.INVERSE_COMM):
            self._second_order.exchange()

    def _precondition(self) -> None:
        gradients, data = self._gradients, self._second_order.data
        with self._timer.phase(Phase.PRECONDITION):
            gradients.read()
            for index in gradients.own:
                self._solver.precondition(
                    gradients.raw[index],
                    data[index, "a"],
                    data[index, "g"],
                    self.config.damping,
                    out=gradients.preconditioned[index],
                )
        with self._timer.phase(Phase.PRECONDITION_COMM):
            gradients.exchange()
        with self._timer.phase(Phase.SCALE):
            if self.config.kl_clip is not None:
                gradients.clip(self._lr(), self.config.kl_clip)
            gradients.write()


def _bare(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def _read_lr(lr: float | Callable[[], float] | Optimizer) -> Callable[[], float]:
    if isinstance(lr, Optimizer):
        return lambda: float(lr.param_groups[0]["lr"])
    if callable(lr):
        return lr
    return lambda: lr
