"""Models that K-FAC cannot precondition as they are wrapped, sharded or placed: refused by name."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from kfac_core.errors import ConfigError


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
    for name, parameter in model.named_parameters():
        if _is_dtensor(parameter):
            sharded = any(type(module).__name__.startswith("FSDP") for module in model.modules())
            how = "fully_shard (FSDP2)" if sharded else "tensor parallelism (DTensor)"
            raise ConfigError(
                f"K-FAC cannot use {how}: parameter {name} is in parts, and a factor needs whole rows; use "
                "DistributedDataParallel, if need be with ZeroRedundancyOptimizer and strategy=mem_opt"
            )
    _refuse_devices(model)


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
    context = getattr(model, "dynamo_ctx", None)
    if getattr(context, "fullgraph", False):
        raise ConfigError(
            "K-FAC's hooks end a graph at each layer, which torch.compile(fullgraph=True) forbids: compile "
            "with fullgraph=False"
        )


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


def _is_dtensor(parameter: nn.Parameter) -> bool:
    tensor = sys.modules.get("torch.distributed.tensor")  # where it is not imported, there is none
    return tensor is not None and isinstance(parameter.data, tensor.DTensor)
