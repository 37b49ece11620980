"""Unwraps the model that K-FAC is given, and reads its learning rate."""

from __future__ import annotations

import inspect
import logging
import numbers
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from kfac_core.config import KFACConfig
from kfac_core.errors import ConfigError
from kfac_core.layers import KroneckerLayer

_ADAPTIVE = re.compile("Ada|Adam|RMSprop|Rprop|Lion|LAMB|Lamb")

LearningRate = float | Callable[[], float] | Optimizer


def discard_compiled(model: nn.Module) -> None:
    """Discard what torch.compile has compiled of `model`'s modules: it would run without K-FAC's hooks.

    Compiled code belongs to a module's class, so other instances of these classes are compiled again too. A
    compiled function around the model, such as a whole training step, is not found; K-FAC then warns that it
    has no statistics.
    """
    if "torch._dynamo.resume_execution" not in sys.modules:
        return  # nothing was compiled, and the compiler need not be loaded
    dynamo = sys.modules["torch._dynamo"]
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


def read_rates(
    lr: LearningRate | None, config: KFACConfig
) -> Callable[[Sequence[KroneckerLayer]], list[float]]:
    """A function for the current learning rates of layers, from a number, a callable or an optimizer.

    A layer's is that of the optimizer's group with its weight.

    Raises:
        ConfigError: `lr` is none of these, for example a scheduler; or it is missing, and needed.
    """
    if lr is None:
        if config.kl_clip is not None and not config.grafting:
            raise ConfigError(
                f"kl_clip={config.kl_clip} needs the learning rate: pass lr=, as a number, a callable or the "
                "optimizer, or set kl_clip to None"
            )
        return lambda layers: []
    if isinstance(lr, Optimizer):
        return partial(_rates_of_groups, lr)
    if callable(lr):
        return lambda layers: [float(lr())] * len(layers)
    if not isinstance(lr, numbers.Real | torch.Tensor):
        raise ConfigError(f"lr must be a number, a callable or the optimizer, got a {type(lr).__name__}")
    return lambda layers: [float(lr)] * len(layers)


def _rates_of_groups(optimizer: Optimizer, layers: Sequence[KroneckerLayer]) -> list[float]:
    groups = optimizer.param_groups
    first = float(groups[0]["lr"])
    if all(group["lr"] is groups[0]["lr"] or float(group["lr"]) == first for group in groups):
        return [first] * len(layers)
    rates = {id(parameter): float(group["lr"]) for group in groups for parameter in group["params"]}
    return [rates.get(id(layer.weight), first) for layer in layers]


def warn_of_adaptive(lr: LearningRate | None, config: KFACConfig) -> None:
    """Log that an optimizer that rescales each element undoes most of the preconditioning."""
    name = type(getattr(lr, "optimizer", lr)).__name__  # accelerate wraps it
    if isinstance(lr, Optimizer) and _ADAPTIVE.search(name):
        logging.getLogger("kfac_core.preconditioner").warning(
            "%s divides each element of the gradient by its own size, which undoes most of the "
            "preconditioning: use SGD behind K-FAC, with grafting=True where its learning rate is to stay",
            name,
        )  # fmt: skip
