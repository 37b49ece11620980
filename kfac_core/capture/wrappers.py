"""Unwraps the model that K-FAC is given, and reads its learning rate."""

from __future__ import annotations

import inspect
import numbers
import sys
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from kfac_core.errors import ConfigError

LearningRate = float | Callable[[], float] | Optimizer


def discard_compiled(model: nn.Module) -> None:
    """Discard what torch.compile has compiled of `model`'s modules: it would run without K-FAC's hooks.

    Compiled code belongs to a module's class, so other instances of these classes are compiled again too. A
    compiled function around the model, such as a whole training step, is not found; K-FAC then warns that it
    has no statistics.
    """
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None:
        return
    after_graph_breaks = dynamo.resume_execution.ContinueExecutionCache.cache
    # torch's own modules, such as nn.Sequential, are compiled inside this wrapper
    codes = {dynamo.external_utils.wrap_inline(nn.Module.__call__).__code__, nn.Module._call_impl.__code__}
    forwards = {inspect.unwrap(type(module).forward) for module in model.modules()}
    for code in codes | {forward.__code__ for forward in forwards if inspect.isfunction(forward)}:
        for each in (code, *after_graph_breaks.get(code, {}).values()):
            dynamo.reset_code(each)


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
