"""Promise: all members of a group issue the same collectives in the same order, whatever the strategy.

Fake worlds: the real step of every rank, over a backend that moves nothing.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from kfac_core import KFAC, KFACConfig
from kfac_core.collectives.torch_distributed import TorchCommunicator, backend_on
from kfac_core.config import Execution
from tests.kfac_core.worlds import fake_world

STRATEGIES = ("comm_opt", "mem_opt", "hybrid_opt", "dp_kfac", "mpd_kfac", "d_kfac", "spd_kfac")
COLLECTIVES = ("all_reduce", "broadcast", "reduce", "barrier")

Issued = list[tuple[Any, ...]]


def issued_by(rank: int, world_size: int, config: KFACConfig, monkeypatch: pytest.MonkeyPatch) -> Issued:
    """What one rank issues in three steps: members, collective, root, shape and dtype."""
    issued: Issued = []

    def recorded(name: str) -> Any:
        real = getattr(dist, name)

        def record(*args: Any, **kwargs: Any) -> Any:
            group = kwargs.get("group")
            members = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
            issued.append((members, name, *args[1:], tuple(args[0].shape) if args else (), args[0].dtype))
            return real(*args, **kwargs)

        return record

    with fake_world(world_size, rank), monkeypatch.context() as patched, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in COLLECTIVES:
            patched.setattr(dist, name, recorded(name))
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 2))
        kfac = KFAC(model, config, lr=0.1, execution=Execution.BATCHED)
        for _ in range(3):
            model(torch.ones(2, 3)).square().mean().backward()
            kfac.step()
            model.zero_grad()
        kfac.remove()
    return issued


def check_order(world_size: int, strategy: str, overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    extra: dict[str, Any] = {"grad_worker_fraction": 0.5} if strategy == "hybrid_opt" else {}
    config = KFACConfig(
        strategy=strategy, overlap_factors=overlap, solver="inverse_pi", factor_update_steps=2,
        inverse_update_steps=2, **extra,
    )  # fmt: skip
    by_rank = [issued_by(rank, world_size, config, monkeypatch) for rank in range(world_size)]
    groups = {call[0] for issued in by_rank for call in issued}
    assert groups
    for members in groups:
        for rank in range(world_size):
            own = [call for call in by_rank[rank] if call[0] == members]
            assert own == (
                [call for call in by_rank[members[0]] if call[0] == members] if rank in members else []
            )


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world_size", [2, 8])
def test_members_of_a_group_issue_the_same_collectives(monkeypatch, world_size, strategy, overlap):
    check_order(world_size, strategy, overlap, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_members_of_a_group_of_64_issue_the_same_collectives(monkeypatch, strategy):
    check_order(64, strategy, True, monkeypatch)


def test_groups_are_connected_before_the_first_step(monkeypatch):
    """NCCL connects in a group's first collective: one element each, whole, column and row."""
    config = KFACConfig(strategy="hybrid_opt", grad_worker_fraction=0.5)
    issued = issued_by(3, 8, config, monkeypatch)
    first = [(len(members), name, shape) for members, name, *_, shape, _ in issued[:3]]
    assert first == [(8, "all_reduce", (1,)), (4, "all_reduce", (1,)), (2, "all_reduce", (1,))]


def test_the_backend_is_asked_by_device(monkeypatch):
    with fake_world(2, 0):
        for config, cpu, cuda in (
            ("cpu:gloo,cuda:nccl", "gloo", "nccl"),
            ("cuda:nccl", "", "nccl"),
            ("cpu:gloo", "gloo", ""),
        ):
            monkeypatch.setattr(dist, "get_backend_config", lambda group=None, config=config: config)
            assert (backend_on("cpu"), backend_on("cuda")) == (cpu, cuda)


def test_a_world_made_without_a_backend_name_is_seen_as_gloo_and_can_be_duplicated(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group(store=store, rank=0, world_size=1)
    try:
        communicator = TorchCommunicator()
        assert dist.get_backend() == "undefined"
        assert communicator._is_direct(torch.zeros(1))
        assert communicator._timeout is not None
        assert communicator.duplicate()._is_direct(torch.zeros(1))
    finally:
        dist.destroy_process_group()
