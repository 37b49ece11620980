"""Promise: DistributedDataParallel, its options and process groups give the result of averaging by hand."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from kfac_core import KFAC, ConfigError, KFACConfig
from tests.kfac_core.runs import LR, assert_same, build, data, run, train

OPTIONS: dict[str, Any] = {"damping": 0.01, "factor_update_steps": 1, "inverse_update_steps": 2}
STEPS = 3


def run_ddp(
    rank: int, world_size: int, net: str, micro_batches: int, options: dict[str, Any], ddp: dict[str, Any]
) -> tuple[list[dict[str, Tensor]], bool]:
    """Gradients of every step, and whether they stayed where DDP had put them."""
    model = DistributedDataParallel(build(net), **ddp)
    optimizer = torch.optim.SGD(model.parameters(), LR)
    kfac = KFAC(model, KFACConfig(**options), lr=optimizer)
    history, stayed = [], True
    for step in range(STEPS):
        x, y = (part[rank::world_size].chunk(micro_batches) for part in data(net, step))
        optimizer.zero_grad()
        for index in range(micro_batches):
            with model.no_sync() if index < micro_batches - 1 else nullcontext():
                (functional.cross_entropy(model(x[index]), y[index]) / micro_batches).backward()
        places = [p.grad.data_ptr() for p in model.parameters()]
        kfac.step()
        stayed &= places == [p.grad.data_ptr() for p in model.parameters()]
        history.append({name: p.grad.clone() for name, p in model.module.named_parameters()})
        optimizer.step()
    return history, stayed


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("ddp", [{}, {"gradient_as_bucket_view": True}], ids=["copies", "bucket-views"])
@pytest.mark.parametrize("strategy", ["comm_opt", "mem_opt"])
def test_ddp_with_and_without_accumulation_equals_one_rank_with_the_whole_batch(
    world, strategy, ddp, micro_batches
):
    options = {**OPTIONS, "strategy": strategy}
    ((want, _),) = world(1).run(run, "conv", options, STEPS)
    for history, stayed in world(2).run(run_ddp, "conv", micro_batches, options, ddp):
        assert stayed
        for got, expected in zip(history, want, strict=True):
            assert_same(got, expected, 1e-10)


def run_zero(rank: int, world_size: int, options: dict[str, Any]) -> list[dict[str, Tensor]]:
    """Parameters after each step, whose optimizer keeps the momentum of its own share of them alone."""
    model = DistributedDataParallel(build("conv"))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=LR, momentum=0.9)
    kfac = KFAC(model, KFACConfig(**options), lr=optimizer)
    history = []
    for step in range(STEPS):
        x, y = (part[rank::world_size] for part in data("conv", step))
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        kfac.step()
        optimizer.step()
        history.append({name: p.detach().clone() for name, p in model.module.named_parameters()})
    return history


def test_an_optimizer_whose_state_is_sharded_takes_the_steps_of_a_whole_one(world):
    model = build("conv")
    optimizer = torch.optim.SGD(model.parameters(), LR, momentum=0.9)
    kfac = KFAC(model, KFACConfig(**OPTIONS), lr=optimizer)
    want = []
    for step in range(STEPS):
        x, y = data("conv", step)
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        kfac.step()
        optimizer.step()
        want.append({name: p.detach().clone() for name, p in model.named_parameters()})
    for history in world(2).run(run_zero, OPTIONS | {"strategy": "mem_opt"}):
        for got, expected in zip(history, want, strict=True):
            assert_same(got, expected, 1e-10)


def unequal_passes(rank: int, world_size: int, sizes: list[int]) -> list[Tensor]:
    """Gradients after a step whose batch came in passes of these sizes; of the small one rows are kept."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(399, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    kfac = KFAC(model, KFACConfig(strategy="comm_opt", factor_update_steps=1, inverse_update_steps=1), lr=0.1)
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


def used_on_one_rank(rank: int, world_size: int, strategy: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The second layer sees examples on rank 0 alone."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.aside = nn.Linear(4, 3).double(), nn.Linear(4, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.first(x) + self.aside(x) if rank == 0 else self.first(x)

    model = DistributedDataParallel(Net(), find_unused_parameters=True)
    config = KFACConfig(strategy=strategy, factor_decay=0.0, damping=0.01, factor_update_steps=1)
    kfac = KFAC(model, config, lr=LR)
    x, y = (part[rank::world_size] for part in data("mlp", 0))
    functional.cross_entropy(model(x), y).backward()
    kfac.step()
    a_factor = {"a": (x.T @ x) / len(x)} if rank == 0 else {}
    state = kfac.state_dict()["factors"]
    return [p.grad for p in model.parameters()], {**a_factor, "got": state["aside.a"][0, :4, :4]}


@pytest.mark.parametrize("strategy", ["comm_opt", "mem_opt", "d_kfac"])
def test_a_layer_used_on_one_rank_has_the_factors_of_that_rank(world, strategy):
    (first, factors), (second, elsewhere) = world(2).run(used_on_one_rank, strategy)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)
    torch.testing.assert_close(factors["got"], factors["a"])
    torch.testing.assert_close(elsewhere["got"], factors["a"])


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
    kfac = KFAC(model, KFACConfig(**options), lr=LR, process_group=None if wrapped else group)
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
    kfac = KFAC(model, KFACConfig(strategy=strategy, **OPTIONS), lr=LR)
    history = train(model, kfac, "mlp", range(10 * index, 10 * index + STEPS))
    return history, kfac.state_dict()["factors"]["0.a"]


@pytest.mark.parametrize("wrapped", [False, True], ids=["process_group", "that-of-ddp"])
@pytest.mark.parametrize("groups", [((0, 1), (2, 3)), ((0, 2), (1, 3))])
@pytest.mark.parametrize("strategy", ["comm_opt", "mem_opt"])
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
    kfac = KFAC(model, KFACConfig(strategy="dp_kfac", factor_update_steps=1), lr=LR)
    x, y = data("mlp", 0)
    functional.cross_entropy(model(x), y).backward()
    return [s.name for s, sums in zip(kfac.shapes, kfac._capture.statistics, strict=True) if sums.shares()]


def test_dp_kfac_computes_factors_on_their_owner_alone(world):
    assert world(2).run(layers_with_statistics) == [["0", "4"], ["2"]]
