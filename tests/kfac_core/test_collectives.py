"""Promise: ranks send what the papers say, to the byte, and a group's members do so in one order.

Closed forms (elements): an F-step reduces a triangle n(n+1)/2 per factor, and one element for the number of
examples in it; an E-step shares n^2 + n of eigen data per factor inside a column; every step shares
n_g n_a per layer inside a row. DP-KFAC sends no factors, COMM-OPT nothing on other steps, MEM-OPT no eigen
data. The order is that of the real step of every rank, over a backend that moves nothing.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from kfac_core import KFAC, KFACConfig, Phase
from kfac_core.collectives import connect
from kfac_core.collectives.torch_distributed import TorchCommunicator, backend_on
from kfac_core.config import Execution
from kfac_core.placement import LayerShape, Placement
from kfac_core.timing import PhaseTimer
from tests.kfac_core.nets import batch, conv_net
from tests.kfac_core.runs import assert_same, data, step
from tests.kfac_core.worlds import fake_world

FLOAT64 = 8
STRATEGIES: list[tuple[str, float | None]] = [
    ("comm_opt", None), ("mem_opt", None), ("hybrid_opt", 0.5), ("dp_kfac", None), ("mpd_kfac", None),
    ("d_kfac", None),
]  # fmt: skip


def count(rank: int, world_size: int, options: dict[str, Any]) -> tuple[Any, ...]:
    """Bytes and calls by phase of an update step and of a step without update."""
    model, communicator = conv_net(), connect()
    timer = PhaseTimer(traffic=communicator.traffic)
    config = KFACConfig.sc20(**options, factor_update_steps=2, inverse_update_steps=2)
    kfac = KFAC(model, config, lr=0.1, timer=timer, communicator=communicator)
    steps = []
    for seed in (rank, rank + 10):
        timer.start()
        x, y = batch(4, seed)
        functional.cross_entropy(model(x), y).backward()
        kfac.step()
        timer.stop()
        totals = timer.drain()
        steps.append((totals.sent_bytes, {p: n for p, n in totals.calls.items() if p.endswith("_comm")}))
    kfac.remove()
    return kfac.placement, kfac.shapes, steps


def closed_form(placement: Placement, shapes: list[LayerShape], rank: int) -> tuple[int, int, int]:
    """Elements that `rank` sends in factor exchange, inverse exchange and gradient exchange."""
    factors = inverses = gradients = 0
    for shape in shapes:
        layer = placement.layers[shape.name]
        for factor, workers in ((shape.a, layer.a_inverse_workers), (shape.g, layer.g_inverse_workers)):
            if len(layer.factor_workers) > 1:
                factors += factor.blocks * factor.dim * (factor.dim + 1) // 2 + 2
            if workers == (rank,) and len(layer.gradient_workers) > 1:
                inverses += factor.blocks * (factor.dim**2 + factor.dim)
        if rank in layer.gradient_workers and placement.columns > 1:
            gradients += shape.gradient_elements
    return factors, inverses, gradients


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(("strategy", "fraction"), STRATEGIES)
def test_counted_bytes_equal_the_closed_form_on_every_rank(world, world_size, strategy, fraction):
    if fraction is not None and world_size == 1:
        fraction = 1.0
    options = {"strategy": strategy, "grad_worker_fraction": fraction}
    for rank, (placement, shapes, steps) in enumerate(world(world_size).run(count, options)):
        expected = closed_form(placement, shapes, rank) if world_size > 1 else (0, 0, 0)
        factors, inverses, gradients = (FLOAT64 * elements for elements in expected)
        update, plain = (sent for sent, _ in steps)
        assert update.get(Phase.FACTOR_COMM, 0) == factors
        assert update.get(Phase.INVERSE_COMM, 0) == inverses
        assert update.get(Phase.PRECONDITION_COMM, 0) == gradients
        assert plain == ({Phase.PRECONDITION_COMM: gradients} if gradients else {})
        if strategy == "dp_kfac":
            assert factors == inverses == 0
        for _, calls in steps:
            assert all(number <= world_size for number in calls.values())


NAMES = ("comm_opt", "mem_opt", "hybrid_opt", "dp_kfac", "mpd_kfac", "d_kfac", "spd_kfac")
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
    config = KFACConfig.sc20(
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


@pytest.mark.parametrize(
    ("strategy", "overlap"),
    [*((strategy, True) for strategy in NAMES), ("mem_opt", False), ("spd_kfac", False)],
)
def test_members_of_a_group_issue_the_same_collectives(monkeypatch, strategy, overlap):
    check_order(8, strategy, overlap, monkeypatch)


def test_groups_are_connected_before_the_first_step(monkeypatch):
    """NCCL connects in a group's first collective: one element each, whole, column and row."""
    config = KFACConfig.sc20(strategy="hybrid_opt", grad_worker_fraction=0.5)
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


def on_a_grid(rank: int, world_size: int, layers: int, group: bool, direct: bool) -> dict[str, Tensor]:
    """A step of hybrid_opt on two by two ranks, of which some may have one more group than others."""
    if group:
        dist.new_group([0, 1])
    torch.manual_seed(0)
    body = [part for _ in range(layers - 1) for part in (nn.Linear(4, 4), nn.Tanh())]
    model = nn.Sequential(*body, nn.Linear(4, 3)).double()
    patch = pytest.MonkeyPatch()
    if not direct:  # as over NCCL
        patch.setattr(TorchCommunicator, "_is_direct", lambda *_: False)
    kfac = KFAC(model, KFACConfig.sc20(strategy="hybrid_opt", grad_worker_fraction=0.5, **EVERY_STEP), lr=0.1)
    for everyone in kfac.placement.groups:
        if rank in everyone:
            kfac._communicator.barrier(everyone)
    gradients = step(model, kfac, *data("mlp", 0), rank, world_size)
    patch.undo()
    return gradients


@pytest.mark.parametrize(
    ("layers", "group", "direct"), [(1, False, True), (2, True, False), (2, True, True), (3, False, False)]
)
def test_rows_and_columns_work_whatever_groups_a_rank_has(world, layers, group, direct):
    found = world(4).run(on_a_grid, layers, group, direct)
    for gradients in found[1:]:
        assert_same(gradients, found[0], 1e-12)
