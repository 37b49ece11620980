"""Promise: rows and columns of a grid have their own groups, whatever other groups a rank has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from kfac_core import KFAC, KFACConfig
from kfac_core.collectives import connect
from kfac_core.collectives.torch_distributed import TorchCommunicator

EVERY_STEP: dict[str, Any] = {"factor_update_steps": 1, "inverse_update_steps": 1}


def timeouts(rank: int, world_size: int) -> list[Any]:
    communicator, rows = connect(), [(0, 1), (2, 3)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(communicator, "_is_direct", lambda _: False)  # as over NCCL, where groups are needed
        communicator.prepare(rows, torch.empty(0))
    groups = [communicator._all, communicator.duplicate()._all, communicator._groups[rows[rank // 2]]]
    return [group._get_backend(torch.device("cpu")).options._timeout for group in groups]


def test_groups_created_later_have_the_timeout_of_the_first(world):
    for first, *later in world(4).run(timeouts):
        assert later == [first, first]
        assert first.total_seconds() != 1800  # torch's own default, which new groups would have


def on_a_grid(rank: int, world_size: int, layers: int, group: bool, direct: bool) -> list[Tensor]:
    """A step of hybrid_opt on two by two ranks, of which some may have one more group than others."""
    if group:
        dist.new_group([0, 1])
    torch.manual_seed(0)
    body = [part for _ in range(layers - 1) for part in (nn.Linear(4, 4), nn.Tanh())]
    model = nn.Sequential(*body, nn.Linear(4, 3)).double()
    patch = pytest.MonkeyPatch()
    if not direct:  # as over NCCL
        patch.setattr(TorchCommunicator, "_is_direct", lambda *_: False)
    kfac = KFAC(model, KFACConfig(strategy="hybrid_opt", grad_worker_fraction=0.5, **EVERY_STEP), lr=0.1)
    x = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mine = slice(rank, None, world_size)
    functional.cross_entropy(model(x[mine]), (torch.arange(8) % 3)[mine]).backward()
    for weight in model.parameters():
        dist.all_reduce(weight.grad)
        weight.grad /= world_size
    for everyone in kfac.placement.groups:
        if rank in everyone:
            kfac._communicator.barrier(everyone)
    kfac.step()
    patch.undo()
    return [weight.grad.clone() for weight in model.parameters()]


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize(("layers", "group"), [(1, False), (2, True), (3, False)])
def test_rows_and_columns_work_whatever_groups_a_rank_has(world, layers, group, direct):
    found = world(4).run(on_a_grid, layers, group, direct)
    for gradients in found[1:]:
        for one, other in zip(found[0], gradients, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-14)
