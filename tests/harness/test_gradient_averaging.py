"""Promise: all ways of averaging give the mean of the ranks' gradients, in the same order at every start."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.errors import TrainingError
from harness.training.gradient_averaging import (
    DDPAverage,
    FlatAverage,
    averaging_method,
    broadcast_model,
    build_average,
)
from kfac_core.collectives import connect
from kfac_core.collectives.mpi import MPICommunicator

Average = DDPAverage | FlatAverage

WIDTH = 700  # a weight has 1.96 MB, and makes the first bucket; two more make the second


class Deep(nn.Module):
    """Runs its layers in the reverse of the order in which they were made."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in reversed(self.layers):
            x = torch.tanh(layer(x))
        return x


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def batch_of(rank: int, step: int = 0) -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def gradients_of(average: Average, model: nn.Module, batch: Any) -> Tensor:
    result = average.forward(loss, batch)
    average.clear()
    result.backward()
    average.average()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def averaged(rank: int, world_size: int, way: str, over: str) -> tuple[Tensor, Tensor, int]:
    """Averaged gradients; the mean of all ranks' local ones, computed on this rank; collectives of a step."""
    communicator, model = MPICommunicator() if over == "mpi" else connect(), Deep()
    average = build_average(way, model, communicator, nullcontext)
    before = communicator.traffic.calls
    summed = gradients_of(average, model, batch_of(rank))
    calls = communicator.traffic.calls - before
    alone = Deep().double()
    whole = torch.stack([loss(alone, batch_of(other).double()) for other in range(world_size)]).mean()
    expected = torch.autograd.grad(whole, list(alone.parameters()))
    return summed, torch.cat([gradient.flatten() for gradient in expected]), calls


@pytest.mark.parametrize(
    ("way", "over", "calls"), [("flat", "gloo", 1), ("flat", "mpi", 1), ("overlapped", "gloo", 2)]
)
def test_gradients_are_the_mean_over_ranks(world, mpi_world, way, over, calls):
    first, *others = (mpi_world if over == "mpi" else world)(3).run(averaged, way, over)
    assert (first[0].double() - first[1]).abs().max() < 1e-6 * first[1].abs().max()
    assert first[2] == calls
    for other in others:
        assert torch.equal(other[0], first[0])


def second_steps(rank: int, _: int) -> tuple[Tensor, Tensor]:
    """Gradients of a second step, and the same as the first step of another start."""
    communicator, model = connect(), Deep()
    average = build_average("overlapped", model, communicator, nullcontext)
    gradients_of(average, model, batch_of(rank))
    second = gradients_of(average, model, batch_of(rank, step=1))
    anew = Deep()
    started_again = build_average("overlapped", anew, communicator, nullcontext)
    return second, gradients_of(started_again, anew, batch_of(rank, step=1))


def test_a_start_in_the_middle_adds_up_in_the_same_order(world):
    for second, again in world(3).run(second_steps):
        assert torch.equal(second, again)


def events(rank: int, _: int) -> list[str]:
    """Starts of buckets, and the gradient that reaches the first layer, in their order."""
    seen: list[str] = []
    communicator = connect()
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    start = communicator.all_reduce_async

    def noted(buffer: Tensor) -> Any:
        seen.append("start")
        return start(buffer)

    communicator.all_reduce_async = noted
    average = build_average("overlapped", model, communicator, nullcontext)
    seen.clear()

    def note_gradient(_: nn.Module, __: Any, output: Tensor) -> None:
        output.register_hook(lambda _: seen.append("first layer"))

    model[0].register_forward_hook(note_gradient)
    gradients_of(average, model, batch_of(rank))
    return seen


def test_buckets_leave_during_the_backward_pass(world):
    for seen in world(2).run(events):
        assert seen.index("start") < seen.index("first layer")
        assert seen.count("start") == 2


class Partial(nn.Module):
    """One of two layers is not used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.used, self.unused = nn.Linear(WIDTH, 3), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def with_unused(rank: int, _: int, way: str) -> str | float:
    model = Partial()
    average = build_average(way, model, connect(), nullcontext)
    try:
        gradients_of(average, model, batch_of(rank))
    except TrainingError as error:
        return str(error)
    return float(model.unused.weight.grad.abs().max()) + float(model.used.weight.grad.abs().max() == 0)


def test_a_parameter_without_a_gradient_has_zeros_or_an_error_says_what_to_do(world):
    assert world(2).run(with_unused, "flat") == [0.0, 0.0]
    for message in world(2).run(with_unused, "overlapped"):
        assert "2 of 4 trained parameters got no gradient" in message
        assert "training.gradient_averaging: flat" in message


def copied(rank: int, _: int) -> list[Tensor]:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    model[1].running_mean += rank
    broadcast_model(model, connect())
    return [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]


def test_ranks_start_with_the_parameters_and_buffers_of_rank_0(world):
    first, second = world(2).run(copied)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    torch.manual_seed(0)
    assert torch.equal(first[0], nn.Linear(3, 2).weight)


def ways(_: int, world_size: int) -> list[str]:
    assert dist.is_initialized()
    asked = (("overlapped", world_size), ("flat", world_size), ("overlapped", 1))
    return [averaging_method(averaging, size) for averaging, size in asked]


def test_by_default_gradients_are_averaged_by_distributed_data_parallel(world):
    assert world(2).run(ways) == 2 * [["DistributedDataParallel", "flat", "none"]]
    assert averaging_method("overlapped", 2) == "flat"  # torch.distributed is not initialised here: over MPI
