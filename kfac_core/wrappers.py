"""Unwraps the model that K-FAC is given, and reads its learning rate."""

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


def reset_compiled() -> None:
    """Make torch.compile compile again: graphs compiled before K-FAC's hooks would run without them.

    This is unconditional: a model compiled in place, or used through another reference to its compiled
    wrapper, cannot be recognised.
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
    """A function for the current learning rate, from a number, a callable or an optimizer's first group.

    Raises:
        ConfigError: `lr` is none of these, for example a scheduler.
    """
    if isinstance(lr, Optimizer):
        return lambda: float(lr.param_groups[0]["lr"])
    if callable(lr):
        return lr
    if not isinstance(lr, numbers.Real | torch.Tensor):
        raise ConfigError(f"lr must be a number, a callable or the optimizer, got a {type(lr).__name__}")
    return lambda: float(lr)
