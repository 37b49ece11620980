"""Promise: under fully_shard (FSDP2) K-FAC gives the result of one rank, or names what it cannot do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import functional

from kfac_core import KFAC, ConfigError, KFACConfig
from kfac_core.config import Execution
from tests.kfac_core.runs import LR, assert_same, build, data

OPTIONS: dict[str, Any] = {"damping": 0.01, "factor_update_steps": 1, "inverse_update_steps": 2}
STEPS = 3


class Attention(nn.Module):
    """Queries, keys and values are rows of one weight, which fully_shard divides elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.attention = nn.Embedding(6, 4), nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return self.head(self.norm(self.attention(x, x, x, need_weights=False)[0]).mean(1))


def model_of(net: str) -> nn.Module:
    if net != "attention":
        return build(net)
    torch.manual_seed(0)
    return Attention().double()


def batch_of(net: str, step: int) -> tuple[Tensor, Tensor]:
    return data("tokens" if net == "attention" else net, step)


def trained(
    rank: int, world_size: int, net: str, options: dict[str, Any], sharded: str, micro_batches: int = 1
) -> list[dict[str, Tensor]]:
    """The preconditioned gradients of every step, whole; `sharded` is `no`, `fsdp` or `hsdp`."""
    model = model_of(net)
    if sharded != "no":
        shape = (world_size,) if sharded == "fsdp" else (2, world_size // 2)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        for layer in model.children():
            fully_shard(layer, mesh=mesh) if any(True for _ in layer.parameters()) else None
        fully_shard(model, mesh=mesh)
        model(batch_of(net, 0)[0])  # the root keeps its whole parameters after it
    optimizer = torch.optim.SGD(model.parameters(), LR)
    execution = options.get("execution", Execution.SEQUENTIAL)
    config = KFACConfig(**{name: value for name, value in options.items() if name != "execution"})
    kfac = KFAC(model, config, lr=optimizer, execution=execution)
    history = []
    for step in range(STEPS):
        x, y = (part[rank::world_size].chunk(micro_batches) for part in batch_of(net, step))
        optimizer.zero_grad()
        for index in range(micro_batches):
            if sharded != "no":
                model.set_requires_gradient_sync(index == micro_batches - 1)
            (functional.cross_entropy(model(x[index]), y[index]) / micro_batches).backward()
        kfac.step()
        history.append({name: whole(p.grad) for name, p in model.named_parameters()})
        optimizer.step()
    return history


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


@pytest.mark.parametrize(
    ("net", "options", "micro_batches"),
    [
        ("conv", {"strategy": "comm_opt"}, 1),
        ("tokens", {"strategy": "mem_opt"}, 3),
        ("attention", {"strategy": "comm_opt", "kl_clip": 1e-5}, 1),
        ("mlp", {"strategy": "mem_opt", "execution": Execution.BATCHED}, 1),
    ],
)
def test_sharded_layers_take_the_steps_of_whole_ones(world, net, options, micro_batches):
    (want,) = [trained(0, 1, net, OPTIONS | options, "no")]
    for history in world(2).run(trained, net, OPTIONS | options, "fsdp", micro_batches):
        for got, expected in zip(history, want, strict=True):
            assert_same(got, expected, 1e-10)


def test_layers_that_are_sharded_in_groups_and_copied_between_them_do_too(world):
    options = OPTIONS | {"strategy": "hybrid_opt", "grad_worker_fraction": 0.5}
    want = trained(0, 1, "conv", OPTIONS | {"strategy": "comm_opt"}, "no")
    for history in world(4).run(trained, "conv", options, "hsdp"):
        for got, expected in zip(history, want, strict=True):
            assert_same(got, expected, 1e-10)


def not_finite_on_one_rank(rank: int, world_size: int) -> list[int]:
    """How many elements of gradients are left, where those of one norm are infinite on rank 1."""
    model = fully_shard(model_of("attention"), mesh=init_device_mesh("cpu", (world_size,)))
    kfac = KFAC(model, KFACConfig(**OPTIONS), lr=LR)
    x, y = batch_of("attention", 0)
    functional.cross_entropy(model(x), y).backward()
    if rank == 1:
        model.norm.weight.grad.to_local().fill_(torch.inf)
    kfac.step()
    return [int(p.grad.to_local().count_nonzero()) for p in model.parameters()]


def test_a_gradient_that_is_not_finite_on_one_rank_stops_the_step_on_all(world):
    assert world(2).run(not_finite_on_one_rank) == [[0] * 9] * 2


def refused(rank: int, world_size: int) -> list[str]:
    """What KFAC says of models that are sharded in ways that it cannot follow."""
    mesh = init_device_mesh("cpu", (world_size,))
    both = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("data", "parts"))
    alone = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("copies", "shards"))["shards"]
    parallel = parallelize_module(build("mlp"), mesh, {"0": ColwiseParallel()})
    mixed = parallelize_module(build("mlp"), both["parts"], {"0": ColwiseParallel()})
    models = [
        parallel,
        fully_shard(mixed, mesh=both["data"]),
        fully_shard(build("mlp"), mesh=alone),
        FullyShardedDataParallel(build("mlp"), device_id=torch.device("cpu")),
    ]
    said = []
    for model in models:
        try:
            KFAC(model, lr=LR)
        except ConfigError as error:
            said.append(str(error))
    return said


def offloaded(rank: int, world_size: int) -> str:
    """What KFAC says where parameters are on the CPU and their mesh is of GPUs, as CPUOffloadPolicy has them.

    fully_shard itself refuses that policy on a machine without an accelerator.
    """
    model = fully_shard(build("mlp"), mesh=init_device_mesh("cpu", (world_size,)))
    gpus = DeviceMesh("cuda", torch.arange(world_size), _init_backend=False, _rank=rank)
    for parameter in model.parameters():
        parameter._spec = replace(parameter._spec, mesh=gpus)
    try:
        KFAC(model, lr=LR)
    except ConfigError as error:
        return str(error)
    return "taken"


def test_an_offload_policy_is_refused_by_name(world):
    want = (
        "K-FAC cannot use fully_shard (FSDP2) with an offload policy: parameter 0.weight is on cpu, and its "
        "layer runs on cuda: leave the policy out"
    )
    assert world(2).run(offloaded) == [want] * 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_offload_policy_itself_is_refused_on_a_gpu():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cuda", (1,))
        model = fully_shard(build("mlp"), mesh=mesh, offload_policy=CPUOffloadPolicy())
        with pytest.raises(ConfigError, match=r"offload policy: parameter 0\.weight is on cpu"):
            KFAC(model, lr=LR)
    finally:
        dist.destroy_process_group()


def test_other_shards_are_refused_by_name(world):
    for said in world(2).run(refused):
        assert len(said) == 4
        assert "K-FAC cannot use tensor parallelism (DTensor): parameter 0.weight" in said[0]
        assert "K-FAC cannot use fully_shard with tensor parallelism: parameter 0.weight" in said[1]
        assert "is sharded over 1 ranks, and K-FAC's world has 2: pass process_group=" in said[2]
        assert "FullyShardedDataParallel (FSDP1)" in said[3]
