"""Promise: predicted calls, bytes and state of every strategy equal those executed and emulated."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch import nn

from analysis.prediction.networks import Network, network_named
from analysis.prediction.work import Exchange, Setup, Work
from kfac_core import KFACConfig, Phase
from kfac_core.collectives import connect
from kfac_core.layers import find_layers
from kfac_core.placement.placement import state_bytes
from kfac_core.placement.strategies import STRATEGIES, place
from tests.emulation import Emulation, ParallelLayers, Part, count
from tests.kfac_core.worlds import World, fake_world

pytestmark = pytest.mark.slow

SIZES = 3, 4
"""Of executed worlds: an odd number and a square of ranks; of one rank and of larger ones one is emulated."""

OTHERS = 11


def parts() -> dict[str, Part]:
    return {
        "stem": Part(nn.Conv2d(3, 8, 3, padding=1, bias=False), (3, 6, 6)),
        "row": Part(nn.Conv2d(8, 12, (1, 3), padding=(0, 1), bias=False), (8, 6, 6)),
        "strided": Part(nn.Conv2d(12, 6, 3, 2, 1), (12, 6, 6)),
        "tokens": Part(nn.Linear(7, 9), (5, 7)),
        "head": Part(nn.Linear(24, 5), (1, 24)),
        "bare": Part(nn.Linear(5, 17, bias=False), (1, 5)),
    }


def network(made: dict[str, Part], others: int = OTHERS) -> Network:
    layers = find_layers(ParallelLayers(made, others, 1), KFACConfig.sc20())
    return Network("parts", tuple(layer.shape for layer in layers), others)


SMALL = network(parts())


def configs(world_size: int) -> Iterator[KFACConfig]:
    """Of four ranks every strategy, hybrid_opt on every grid; of three every solver and other dtypes."""
    if world_size == 4:  # what a solver or a dtype changes does not depend on the size
        for strategy in STRATEGIES:
            for fraction in (0.25, 0.5, 1.0) if strategy == "hybrid_opt" else [None]:
                yield KFACConfig.sc20(strategy=strategy, grad_worker_fraction=fraction)
        return
    yield KFACConfig.sc20(strategy="mpd_kfac", solver="inverse")
    yield KFACConfig.sc20(strategy="comm_opt", solver="inverse_pi")
    yield KFACConfig.sc20(strategy="comm_opt", solver="inverse_pi", split_factors="never")
    yield KFACConfig.sc20(strategy="comm_opt", inverse_dtype="bfloat16", factor_dtype="float64")
    yield KFACConfig.sc20(strategy="comm_opt", eigen_rank=16)
    yield KFACConfig.sc20(strategy="mem_opt", eigen_rank=16)
    yield KFACConfig.sc20(strategy="dp_kfac", assignment="balanced", solver="inverse_pi")


def sent_by(exchange: Exchange, rank: int) -> tuple[int, int]:
    """Calls and bytes that are counted on `rank`, a member."""
    if exchange.operation == "gather_parts":
        own = exchange.sizes[exchange.group.index(rank)]
        return int(own > 0), own
    return exchange.parts, sum(exchange.sizes)


def traffic(work: Work, rank: int, *, update: bool) -> dict[Phase, tuple[int, int]]:
    """Calls and bytes by phase that `rank` sends in a step with all updates, or with none."""
    found: dict[Phase, tuple[int, int]] = {}
    for exchange in work.exchanges:
        if not update and exchange.phase in (Phase.FACTOR_COMM, Phase.INVERSE_COMM):
            continue
        in_row = rank % len(exchange.group) if exchange.phase == Phase.PRECONDITION_COMM else rank
        if in_row in exchange.group:
            calls, sent = sent_by(exchange, in_row)
            before = found.get(exchange.phase, (0, 0))
            found[exchange.phase] = before[0] + calls, before[1] + sent
    return {phase: counted for phase, counted in found.items() if counted[0]}


def check(seen: Emulation, work: Work) -> None:
    rank = seen.rank
    for step, update in ((seen.update, True), (seen.plain, False)):
        counted = {phase: (calls, step.sent_bytes[phase]) for phase, calls in step.calls.items()}
        assert counted == traffic(work, rank, update=update)
    assert seen.state_bytes == {kind: work.state_bytes[kind][rank] for kind in seen.state_bytes}


def run_every_size(rank: int, world_size: int, folder: str) -> list[tuple[int, KFACConfig, Emulation]]:
    """Steps in worlds of the first ranks, of each of `SIZES`, one after another; the other ranks wait."""
    seen: list[tuple[int, KFACConfig, Emulation]] = []
    dist.destroy_process_group()
    for size in [size for size in SIZES if size > rank]:
        store = dist.FileStore(f"{folder}/{size}", size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        communicator = connect()
        for config in configs(size):
            layers = ParallelLayers(parts(), OTHERS, batch_size=2)
            seen.append((size, config, count(layers, config, communicator)))
        dist.destroy_process_group()
    return seen


def test_executed_worlds_of_one_to_four_send_and_keep_what_was_predicted(tmp_path):
    world = World(max(SIZES), "harness.training.train")
    checked = 0
    try:
        for rank, seen in enumerate(world.run(run_every_size, str(tmp_path))):
            for size, config, emulation in seen:
                assert (emulation.rank, emulation.world_size) == (rank, size)
                check(emulation, Work(Setup(SMALL, config, size, 2)))
                checked += 1
    finally:
        world.close()
    assert checked == sum(size * len(list(configs(size))) for size in SIZES)


@pytest.mark.parametrize(
    ("world_size", "rank", "strategy"),
    [
        (1, 0, "comm_opt"),
        (12, 5, "dp_kfac"),  # an owner alone, and a grid of 3 by 4: no executed world's
        (12, 5, "hybrid_opt"),
        (4096, 4095, "mem_opt"),
        (4096, 3, "dp_kfac"),
    ],
)
def test_emulated_worlds_of_up_to_4096_send_and_keep_what_was_predicted(world_size, rank, strategy):
    fraction = 0.25 if strategy == "hybrid_opt" else None
    config = KFACConfig.sc20(strategy=strategy, grad_worker_fraction=fraction, solver="inverse_pi")
    work = Work(Setup(SMALL, config, world_size, 1))
    with fake_world(world_size, rank), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # values from other ranks are missing
        seen = count(ParallelLayers(parts(), OTHERS, 1), config, connect())
    check(seen, work)
    if strategy == "dp_kfac":  # the FLOPs; of a rank that owns no layer there are none
        assert seen.plain.flops.get("precondition", 0) == work.precondition_flops[rank]


@pytest.mark.parametrize("strategy", ["comm_opt", "hybrid_opt", "dp_kfac"])
def test_all_ranks_at_once_is_the_footprint_of_each(strategy):
    config = KFACConfig.sc20(
        strategy=strategy, grad_worker_fraction=0.25 if strategy == "hybrid_opt" else None
    )
    work = Work(Setup(network_named("resnet20"), config, 24, 1))
    shapes = network_named("resnet20").shapes
    placement = place(config, shapes, 24)
    for rank in range(24):
        one = state_bytes(placement, shapes, config, rank)
        assert one == {kind: by_rank[rank] for kind, by_rank in work.state_bytes.items()}
