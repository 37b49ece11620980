"""What is around a model that K-FAC is given, and where its learning rate comes from."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

LearningRate = float | Callable[[], float] | Optimizer


def forget_compiled(model: nn.Module) -> None:
    """What torch.compile has compiled before K-FAC's hooks were there would run without them."""
    if any(hasattr(module, "_orig_mod") for module in model.modules()):
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
    """The learning rate in force: a number, what a callable says, or that of the first parameter group."""
    if isinstance(lr, Optimizer):
        return lambda: float(lr.param_groups[0]["lr"])
    if callable(lr):
        return lr
    return lambda: lr
