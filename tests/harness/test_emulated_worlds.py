"""Promise: predicted calls, bytes and state of every strategy equal those executed and emulated."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from analysis.cost_model.models import Layer, Model, read_model
from analysis.cost_model.work import Setup, Work
from kfac_core import KFACConfig
from kfac_core.collectives import connect
from kfac_core.collectives.single import SingleCommunicator
from kfac_core.placement.footprint import state_bytes
from kfac_core.placement.strategies import STRATEGIES, place
from tests.emulation import Emulation, ParallelLayers, count, emulate
from tests.kfac_core.worlds import World

pytestmark = pytest.mark.slow

SIZES = 1, 3, 4
"""Of executed worlds: none, an odd number and a square of ranks; larger ones are emulated."""

SMALL = Model(
    "small",
    (
        Layer("stem", 3, 8, (3, 3), 1, (1, 1), (6, 6)),
        Layer("row", 8, 12, (1, 3), 1, (0, 1), (6, 6)),
        Layer("half", 12, 6, (3, 3), 2, (1, 1), (6, 6), bias=True),
        Layer("tokens", 7, 9, size=(1, 5), bias=True, kind="linear"),
        Layer("head", 24, 5, bias=True, kind="linear"),
        Layer("bare", 5, 17, kind="linear"),
    ),
    other_parameters=11,
)


@pytest.fixture(scope="module", autouse=True)
def _quick_collections():
    """Every fake world ends with a collection, which would go through all of torch each time."""
    list(emulate(SMALL.layers, SMALL.other_parameters, KFACConfig(), 2, [0]))
    gc.freeze()
    yield
    gc.unfreeze()


def configs(world_size: int) -> Iterator[KFACConfig]:
    """Every strategy, hybrid_opt on every grid; in uneven worlds every solver and other dtypes too."""
    for strategy in STRATEGIES:
        grids = [m for m in range(1, world_size + 1) if world_size % m == 0]
        for workers in grids if strategy == "hybrid_opt" else [None]:
            fraction = workers / world_size if workers else None
            yield KFACConfig(strategy=strategy, grad_worker_fraction=fraction)
    if world_size == 4:  # what a solver or a dtype changes does not depend on the size
        return
    yield KFACConfig(strategy="mpd_kfac", solver="inverse")
    yield KFACConfig(strategy="comm_opt", solver="inverse_pi")
    yield KFACConfig(strategy="comm_opt", solver="inverse_pi", split_factors="never")
    yield KFACConfig(strategy="comm_opt", inverse_dtype="bfloat16", factor_dtype="float64")
    yield KFACConfig(strategy="comm_opt", eigen_rank=16)
    yield KFACConfig(strategy="mem_opt", eigen_rank=16)
    yield KFACConfig(strategy="dp_kfac", assignment="balanced", solver="inverse_pi")


def check(seen: Emulation, work: Work) -> None:
    rank = seen.rank
    for step, update in ((seen.update, True), (seen.plain, False)):
        counted = {phase: (calls, step.sent_bytes[phase]) for phase, calls in step.calls.items()}
        assert counted == work.traffic(rank, update=update)
    assert seen.state_bytes == {kind: work.state_bytes[kind][rank] for kind in seen.state_bytes}


def check_precondition(seen: Emulation, work: Work) -> None:
    """The FLOPs; of a rank that owns no layer there are none."""
    assert seen.plain.flops.get("precondition", 0) == work.precondition_flops[seen.rank]


def run_every_size(rank: int, world_size: int, folder: str) -> list[tuple[int, KFACConfig, Emulation]]:
    """Steps in worlds of the first ranks, of each of `SIZES`, one after another; the other ranks wait."""
    seen: list[tuple[int, KFACConfig, Emulation]] = []
    dist.destroy_process_group()
    for size in [size for size in SIZES if size > rank]:
        store = dist.FileStore(f"{folder}/{size}", size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        communicator = connect()
        for config in configs(size):
            layers = ParallelLayers(SMALL.layers, SMALL.other_parameters, batch_size=2)
            seen.append((size, config, count(layers, config, communicator)))
        dist.destroy_process_group()
    return seen


def test_executed_worlds_of_one_to_four_send_and_keep_what_was_predicted(tmp_path):
    world = World(max(SIZES))
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
    ("world_size", "ranks", "strategies"),
    [
        (12, (5,), ("dp_kfac", "hybrid_opt")),  # an owner alone, and a grid of 3 by 4: no executed world's
        (4096, (4095,), STRATEGIES),
    ],
)
def test_emulated_worlds_of_up_to_4096_send_and_keep_what_was_predicted(world_size, ranks, strategies):
    for strategy in strategies:
        fraction = 0.25 if strategy == "hybrid_opt" else None
        config = KFACConfig(strategy=strategy, grad_worker_fraction=fraction, solver="inverse_pi")
        work = Work(Setup(SMALL, config, world_size, 1))
        for seen in emulate(SMALL.layers, SMALL.other_parameters, config, world_size, ranks):
            check(seen, work)
            if strategy == "dp_kfac":
                check_precondition(seen, work)


def test_emulation_counts_what_execution_counts():
    """With world size 1 both run; the emulated tensors hold no numbers."""
    config = KFACConfig(strategy="comm_opt")
    layers = ParallelLayers(SMALL.layers, SMALL.other_parameters, batch_size=2)
    executed = count(layers, config, SingleCommunicator())
    [emulated] = emulate(SMALL.layers, SMALL.other_parameters, config, 1, [0], batch_size=2)
    assert emulated == executed
    assert executed.update.flops["inverse_compute"] > 0


def test_a_paper_model_at_4096_ranks():
    model = read_model("resnet50")
    config = KFACConfig(strategy="dp_kfac", solver="inverse")
    work = Work(Setup(model, config, 4096, 1))
    for seen in emulate(model.layers, model.other_parameters, config, 4096, [17]):
        check(seen, work)
        check_precondition(seen, work)
        assert work.precondition_flops[17] > 0 == work.precondition_flops[4095]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_ranks_at_once_is_the_footprint_of_each(strategy):
    config = KFACConfig(strategy=strategy, grad_worker_fraction=0.25 if strategy == "hybrid_opt" else None)
    work = Work(Setup(read_model("resnet20"), config, 24, 1))
    placement = place(config, read_model("resnet20").shapes, 24)
    for rank in range(24):
        one = state_bytes(placement, read_model("resnet20").shapes, config, rank)
        assert one == {kind: by_rank[rank] for kind, by_rank in work.state_bytes.items()}
