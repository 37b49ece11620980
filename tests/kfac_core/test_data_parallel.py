"""Promise: DistributedDataParallel, fully_shard and process groups give the result of one rank."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from kfac_core import KFAC, ConfigError, KFACConfig
from kfac_core.config import Execution
from tests.kfac_core.runs import LR, assert_same, build, data, train

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


def wrapped_as(kind: str, model: nn.Module, world_size: int) -> nn.Module:
    """In DistributedDataParallel, sharded, or as it is."""
    if kind in ("ddp", "bucket views", "zero"):
        return DistributedDataParallel(model, gradient_as_bucket_view=kind == "bucket views")
    if kind == "some":
        fully_shard(model[0], mesh=init_device_mesh("cpu", (world_size,)))
    if kind in ("fsdp", "hsdp"):
        shape = (world_size,) if kind == "fsdp" else (2, world_size // 2)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        for layer in model.children():
            fully_shard(layer, mesh=mesh) if any(True for _ in layer.parameters()) else None
        fully_shard(model, mesh=mesh)
    return model


def trained(
    rank: int,
    world_size: int,
    net: str,
    kind: str,
    micro_batches: int,
    options: dict[str, Any],
    execution: Execution = Execution.SEQUENTIAL,
) -> list[dict[str, Tensor]]:
    """The preconditioned gradients of every step, whole; with `zero` the optimizer's momentum is sharded."""
    model = wrapped_as(kind, model_of(net), world_size)
    if kind == "fsdp":
        model(batch_of(net, 0)[0])  # the root keeps its whole parameters after it
    parameters, rates = model.parameters(), {"lr": LR, "momentum": 0.9}
    optimizer = (
        ZeroRedundancyOptimizer(parameters, torch.optim.SGD, **rates)
        if kind == "zero"
        else torch.optim.SGD(parameters, **rates)
    )
    kfac = KFAC(model, KFACConfig.sc20(**options), lr=optimizer, execution=execution)
    history = []
    for step in range(STEPS):
        x, y = (part[rank::world_size].chunk(micro_batches) for part in batch_of(net, step))
        optimizer.zero_grad()
        for index in range(micro_batches):
            is_last = index == micro_batches - 1
            if kind in ("fsdp", "hsdp"):
                model.set_requires_gradient_sync(is_last)
            with nullcontext() if is_last or not hasattr(model, "no_sync") else model.no_sync():
                (functional.cross_entropy(model(x[index]), y[index]) / micro_batches).backward()
        for p in model.parameters() if kind == "some" else ():
            if not isinstance(p, DTensor):  # nothing averages these
                dist.all_reduce(p.grad)
                p.grad /= world_size
        grads = [p.grad for p in model.parameters()]
        kfac.step()
        if isinstance(model, DistributedDataParallel):  # gradients stay where it has put them
            assert all(p.grad is grad for p, grad in zip(model.parameters(), grads, strict=True))
        bare = getattr(model, "module", model)
        history.append({name: whole(p.grad) for name, p in bare.named_parameters()})
        optimizer.step()
    return history


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


@pytest.mark.parametrize(
    ("kind", "world_size", "net", "options", "micro_batches"),
    [
        ("ddp", 2, "conv", {"strategy": "comm_opt"}, 1), ("ddp", 2, "conv", {"strategy": "mem_opt"}, 3),
        ("bucket views", 2, "conv", {"strategy": "comm_opt"}, 3),
        ("zero", 2, "conv", {"strategy": "mem_opt"}, 1), ("fsdp", 2, "conv", {"strategy": "comm_opt"}, 1),
        ("fsdp", 2, "tokens", {"strategy": "mem_opt"}, 3),
        ("fsdp", 2, "attention", {"strategy": "comm_opt", "kl_clip": 1e-5}, 1),
        ("hsdp", 4, "conv", {"strategy": "hybrid_opt", "grad_worker_fraction": 0.5}, 1),
        ("some", 2, "mlp", {"strategy": "mem_opt"}, 1),
    ],
)  # fmt: skip
def test_wrapped_models_take_the_steps_of_one_rank_with_the_whole_batch(
    world, kind, world_size, net, options, micro_batches
):
    alone = {**OPTIONS, **options, "strategy": "comm_opt"} | {"grad_worker_fraction": None}
    want = trained(0, 1, net, "no", micro_batches, alone)
    for history in world(world_size).run(trained, net, kind, micro_batches, OPTIONS | options):
        for got, expected in zip(history, want, strict=True):
            assert_same(got, expected, 1e-10)


def test_what_a_gpu_runs_does_too_where_layers_are_sharded(world):
    options = OPTIONS | {"strategy": "mem_opt"}
    want = trained(0, 1, "mlp", "no", 1, options, Execution.BATCHED)
    for history in world(2).run(trained, "mlp", "fsdp", 1, options, Execution.BATCHED):
        for got, expected in zip(history, want, strict=True):
            assert_same(got, expected, 1e-10)


def not_finite_on_one_rank(rank: int, world_size: int) -> list[int]:
    """How many elements of gradients are left, where those of one norm are infinite on rank 1."""
    model = fully_shard(model_of("attention"), mesh=init_device_mesh("cpu", (world_size,)))
    kfac = KFAC(model, KFACConfig.sc20(**OPTIONS), lr=LR)
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


def test_other_shards_are_refused_by_name(world):
    for said in world(2).run(refused):
        assert len(said) == 4
        assert "K-FAC cannot use tensor parallelism (DTensor): parameter 0.weight" in said[0]
        assert "K-FAC cannot use fully_shard with tensor parallelism: parameter 0.weight" in said[1]
        assert "is sharded over 1 ranks, and K-FAC's world has 2: pass process_group=" in said[2]
        assert "FullyShardedDataParallel (FSDP1)" in said[3]


def unequal_passes(rank: int, world_size: int, sizes: list[int]) -> list[Tensor]:
    """Gradients after a step whose batch came in passes of these sizes; of the small one rows are kept."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(399, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    kfac = KFAC(
        model, KFACConfig.sc20(strategy="comm_opt", factor_update_steps=1, inverse_update_steps=1), lr=0.1
    )
    generator = torch.Generator().manual_seed(1)
    for size in sizes:
        x = torch.randn(size, 399, dtype=torch.float64, generator=generator)
        mine = slice(rank, None, world_size)
        losses = functional.cross_entropy(model(x[mine]), (torch.arange(size) % 3)[mine], reduction="sum")
        (losses * world_size / sum(sizes)).backward()
    if world_size > 1:
        for weight in model.parameters():
            dist.all_reduce(weight.grad)
            weight.grad /= world_size
    kfac.step()
    return [weight.grad.clone() for weight in model.parameters()]


@pytest.mark.parametrize("sizes", [[4, 240], [240, 4]])
def test_a_triangle_and_rows_of_two_passes_are_summed(world, sizes):
    expected = unequal_passes(0, 1, sizes)
    for gradients in world(2).run(unequal_passes, sizes):
        for one, other in zip(expected, gradients, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-14)


Groups = tuple[tuple[int, ...], ...]


def run_in_groups(
    rank: int, world_size: int, options: dict[str, Any], groups: Groups, wrapped: bool
) -> tuple[int, list[dict[str, Tensor]], Tensor] | None:
    """Groups of ranks train at the same time, each on data of its own; its number, gradients and a factor."""
    process_groups = [dist.new_group(group) for group in groups]
    mine = next((index for index, group in enumerate(groups) if rank in group), None)
    if mine is None:
        return None
    place, size, group = groups[mine].index(rank), len(groups[mine]), process_groups[mine]
    inner = build("mlp")
    model = DistributedDataParallel(inner, process_group=group) if wrapped else inner
    kfac = KFAC(model, KFACConfig.sc20(**options), lr=LR, process_group=None if wrapped else group)
    history = []
    for step in range(STEPS):
        x, y = data("mlp", 10 * mine + step)
        inner.zero_grad()
        functional.cross_entropy(model(x[place::size]), y[place::size]).backward()
        for parameter in inner.parameters() if not wrapped else ():
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad /= size
        kfac.step()
        history.append({name: p.grad.clone() for name, p in inner.named_parameters()})
        with torch.no_grad():
            for parameter in inner.parameters():
                parameter.sub_(LR * parameter.grad)
    return mine, history, kfac.state_dict()["factors"]["0.a"]


def alone(index: int, strategy: str) -> tuple[list[dict[str, Tensor]], Tensor]:
    """The expected result of a group: one process with its whole batches."""
    model = build("mlp")
    kfac = KFAC(model, KFACConfig.sc20(strategy=strategy, **OPTIONS), lr=LR)
    history = train(model, kfac, "mlp", range(10 * index, 10 * index + STEPS))
    return history, kfac.state_dict()["factors"]["0.a"]


@pytest.mark.parametrize(
    ("strategy", "groups", "wrapped"),
    [
        ("comm_opt", ((0, 1), (2, 3)), True), ("mem_opt", ((0, 2), (1, 3)), False),
        ("mem_opt", ((0, 2), (1, 3)), True),
    ],
)  # fmt: skip
def test_two_groups_of_equal_size_train_side_by_side(world, strategy, groups, wrapped):
    expected = [alone(index, strategy) for index in range(2)]
    options = {**OPTIONS, "strategy": strategy}
    for mine, history, factor in world(4).run(run_in_groups, options, groups, wrapped):
        want, want_factor = expected[mine]
        torch.testing.assert_close(factor, want_factor)
        for got, gradients in zip(history, want, strict=True):
            assert_same(got, gradients, 1e-10)


def test_rows_and_columns_of_a_group_are_made_of_its_own_ranks(world):
    options = {**OPTIONS, "strategy": "hybrid_opt", "grad_worker_fraction": 0.5}
    want, _ = alone(0, "comm_opt")
    outsider, *members = world(5).run(run_in_groups, options, ((1, 2, 3, 4),), False)
    assert outsider is None
    for _, history, _ in members:
        for got, gradients in zip(history, want, strict=True):
            assert_same(got, gradients, 1e-10)


def outside(rank: int, world_size: int) -> str:
    group = dist.new_group([0])
    try:
        KFAC(build("mlp"), lr=LR, process_group=group)
    except ConfigError as error:
        return str(error)
    return "taken"


def test_a_rank_outside_the_group_is_an_error(world):
    assert world(2).run(outside) == [
        "taken",
        "rank 1 is not a member of process_group, and cannot run K-FAC in it",
    ]


def layers_with_statistics(rank: int, world_size: int) -> list[str]:
    model = build("mlp")
    kfac = KFAC(model, KFACConfig.sc20(strategy="dp_kfac", factor_update_steps=1), lr=LR)
    x, y = data("mlp", 0)
    functional.cross_entropy(model(x), y).backward()
    return [s.name for s, sums in zip(kfac.shapes, kfac._capture.statistics, strict=True) if sums.shares()]


def test_dp_kfac_computes_factors_on_their_owner_alone(world):
    assert world(2).run(layers_with_statistics) == [["0", "4"], ["2"]]
