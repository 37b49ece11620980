"""What is around a model: wrappers that K-FAC unwraps or refuses by name, and its learning rates."""

from __future__ import annotations

import inspect
import logging
import numbers
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from kfac_core.config import KFACConfig
from kfac_core.errors import ConfigError
from kfac_core.layers import KroneckerLayer, is_fully_sharded
from kfac_core.layers.layer import is_sharded

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
        if config.kl_clip is not None:
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


# ------------------------------------------------------------
# Models that K-FAC cannot precondition as they are wrapped, sharded or placed: refused by name.


_WHOLE_LAYERS = (("Shard",), ("Replicate",), ("Replicate", "Shard"))
"""How fully_shard alone divides a parameter: over all ranks, not at all, or within groups of ranks (HSDP)."""


def refuse_unsupported(model: nn.Module) -> None:
    """Refuse a model in which hooks would not see whole layers, or see another process's part of them.

    Args:
        model: as the user gave it, with its wrappers.

    Raises:
        ConfigError: naming the wrapper, and what to use in its place.
    """
    _refuse_compiled_whole(model)
    for module in model.modules():
        if isinstance(module, nn.DataParallel):
            raise ConfigError(
                "K-FAC cannot use nn.DataParallel, whose replicas run in threads: use DistributedDataParallel"
            )
        if type(module).__name__ == "FullyShardedDataParallel":  # not imported for a name
            raise ConfigError(
                "K-FAC cannot use FullyShardedDataParallel (FSDP1), which keeps a flat part of each layer: "
                "use DistributedDataParallel, if need be with ZeroRedundancyOptimizer and strategy=mem_opt"
            )
    _refuse_devices(model)


def refuse_parts_of_layers(model: nn.Module, world_size: int) -> None:
    """Refuse sharded parameters, except where fully_shard shows whole layers and averages over all ranks.

    Raises:
        ConfigError: naming the parameter, and what its shards are.
    """
    managed = {
        id(parameter)
        for module in model.modules()
        if getattr(module, "_is_fsdp_managed_module", False)
        for parameter in module.parameters(recurse=False)
    }
    for name, parameter in model.named_parameters():
        if is_sharded(parameter) and (why := _refused(parameter, world_size, id(parameter) in managed)):
            raise ConfigError(f"K-FAC cannot use {why[0]}: parameter {name} {why[1]}")


def _refused(parameter: Any, world_size: int, by_fsdp: bool) -> tuple[str, str] | None:
    """What a sharded parameter is in, and why that cannot be exact."""
    mesh, shards = parameter.device_mesh, [type(each).__name__ for each in parameter.placements]
    if not by_fsdp or shards not in (list(each) for each in _WHOLE_LAYERS):
        how = "fully_shard with tensor parallelism" if by_fsdp else "tensor parallelism (DTensor)"
        return (
            how,
            "is in parts also while its layer runs, and a factor needs whole rows; use data parallelism",
        )
    if mesh.size() != world_size:
        return (
            "fully_shard (FSDP2) of a part of its ranks",
            f"is sharded over {mesh.size()} ranks, and K-FAC's world has {world_size}: pass process_group=",
        )
    if parameter.device.type != mesh.device_type:
        return (
            "fully_shard (FSDP2) with an offload policy",
            f"is on {parameter.device}, and its layer runs on {mesh.device_type}: leave the policy out",
        )
    return None


def sharded_modules(model: nn.Module) -> list[Any]:
    """The modules under fully_shard.

    Their `reshard()` gives parameters their shards back, which the optimizer updates. They are away after a
    forward pass without a backward pass, and with `set_reshard_after_backward(False)`.
    """
    return [module for module in model.modules() if is_fully_sharded(module)]


def refuse_join(wrapper: DistributedDataParallel | None, world_size: int) -> None:
    """Refuse a step inside of DDP's `join`: ranks whose data has ended would not take part in K-FAC's.

    Raises:
        ConfigError: more than one rank, and `join` is active.
    """
    if wrapper is not None and world_size > 1 and wrapper._join_config.enable:
        raise ConfigError(
            "K-FAC cannot run inside DistributedDataParallel.join(): a rank whose data has ended takes no "
            "step, and the others would wait for it; give all ranks the same number of batches, as with "
            "DistributedSampler (uneven batches are exact)"
        )


def _refuse_compiled_whole(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if any(getattr(context, "fullgraph", False) for context in _compilers(module)):
            where = f" (module {name})" if name else ""
            raise ConfigError(
                "K-FAC's hooks end a graph at each layer, which torch.compile(fullgraph=True) forbids: "
                f"compile with fullgraph=False{where}"
            )


def _compilers(module: nn.Module) -> list[object]:
    """What compiles a module: of `torch.compile(module)`, and of `module.compile()`, in a closure."""
    cells = getattr(module._compiled_call_impl, "__closure__", None) or ()
    return [getattr(module, "dynamo_ctx", None), *(cell.cell_contents for cell in cells)]


def _refuse_devices(model: nn.Module) -> None:
    devices = dict.fromkeys(_devices(model))
    if any(device.type == "meta" for device in devices):
        raise ConfigError("the model is on the meta device: materialise it (to_empty) before KFAC is made")
    if len(devices) > 1:
        raise ConfigError(
            f"the model is on several devices ({', '.join(map(str, devices))}): K-FAC needs a model on one "
            "device in each process; use DistributedDataParallel"
        )


def _devices(model: nn.Module) -> Iterator[torch.device]:
    yield from (parameter.device for parameter in model.parameters() if parameter.requires_grad)
