"""What is around a model that K-FAC is given, and where its learning rate comes from."""

from __future__ import annotations

import numbers
import sys
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from kfac_core.errors import ConfigError

LearningRate = float | Callable[[], float] | Optimizer


def forget_compiled() -> None:
    """What torch.compile has compiled before K-FAC's hooks were there would run without them.

    A model that was compiled in place, or whose compiled wrapper somebody else holds, does not show it.
    """
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


def unwrap(model: nn.Module) -> tuple[nn.Module, DistributedDataParallel | None]:
    """The model itself, and the DistributedDataParallel around it."""
    wrapper = None
    while True:
        if isinstance(model, DistributedDataParallel):
            wrapper, model = model, model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):  # compiled
            model = inner
        else:
            return model, wrapper


def read_lr(lr: LearningRate) -> Callable[[], float]:
    """The learning rate in force: a number, what a callable says, or that of the first parameter group.

    Raises:
        ConfigError: it is none of these, but a scheduler, say.
    """
    if isinstance(lr, Optimizer):
        return lambda: float(lr.param_groups[0]["lr"])
    if callable(lr):
        return lr
    if not isinstance(lr, numbers.Real | torch.Tensor):
        raise ConfigError(f"lr: a {type(lr).__name__}; allowed: a number, a callable, or the optimizer")
    return lambda: float(lr)
