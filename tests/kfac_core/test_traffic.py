"""Promise: traffic equals the papers' tables to the byte, in few calls for any layers.

Closed forms (elements): an F-step reduces a triangle n(n+1)/2 per factor, and one element for the number of
examples in it; an E-step shares n^2 + n of eigen data per factor inside a column; every step shares
n_g n_a per layer inside a row. DP-KFAC sends no factors, COMM-OPT nothing on other steps, MEM-OPT no eigen
data.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch.nn import functional

from kfac_core import KFAC, KFACConfig, Phase
from kfac_core.collectives import connect
from kfac_core.placement import LayerShape, Placement
from kfac_core.timing import PhaseTimer
from tests.kfac_core.nets import batch, conv_net
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
    config = KFACConfig(**options, factor_update_steps=2, inverse_update_steps=2)
    kfac = KFAC(model, config, lr=0.1, timer=timer, communicator=communicator)
    steps = []
    for step in range(2):
        timer.start()
        x, y = batch(4, seed=rank + 10 * step)
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


def divisors(world_size: int) -> list[int]:
    return [workers for workers in range(1, world_size + 1) if world_size % workers == 0]


EVERY_WORLD = [
    (world_size, strategy, workers / world_size if strategy == "hybrid_opt" else None)
    for world_size in range(1, 9)
    for strategy, _ in STRATEGIES
    for workers in (divisors(world_size) if strategy == "hybrid_opt" else [1])
]


def count_everywhere(rank: int, world_size: int) -> list[tuple[int, str, float | None, int, Any]]:
    """Every rank of every world in turn; only communication is replaced, by torch's fake group."""
    counted = []
    with fake_world(2, 0):
        count(0, 2, {"strategy": "comm_opt"})
    gc.freeze()  # every fake world ends with a collection, which would go through all of torch each time
    for size, strategy, fraction in EVERY_WORLD:
        options = {"strategy": strategy, "grad_worker_fraction": fraction}
        for one in range(size):
            with fake_world(size, one):
                counted.append((size, strategy, fraction, one, count(one, size, options)))
    gc.unfreeze()
    return counted


def test_counted_bytes_equal_the_closed_form_in_every_world_of_one_to_eight(world):
    """Executed worlds above are the check on this one: what is counted does not depend on what arrives."""
    (counted,) = world(1).run(count_everywhere)
    assert len({(size, strategy) for size, strategy, *_ in counted}) == 8 * len(STRATEGIES)
    for size, strategy, fraction, rank, (placement, shapes, (update, plain)) in counted:
        where = f"{strategy} {fraction} on rank {rank} of {size}"
        elements = closed_form(placement, shapes, rank) if size > 1 else (0, 0, 0)
        names = (Phase.FACTOR_COMM, Phase.INVERSE_COMM, Phase.PRECONDITION_COMM)
        expected = {name: FLOAT64 * n for name, n in zip(names, elements, strict=True) if n}
        assert {name: n for name, n in update[0].items() if n} == expected, where
        gradients = {name: n for name, n in expected.items() if name == Phase.PRECONDITION_COMM}
        assert {name: n for name, n in plain[0].items() if n} == gradients, where


def test_packing_halves_what_factors_send(world):
    """A square factor has n^2 elements, a triangle n(n+1)/2; two more for its loss terms and rows."""
    for placement, shapes, ((sent, _), _) in world(2).run(count, {"strategy": "comm_opt"}):
        assert placement.world_size == 2
        dims = [factor.dim for shape in shapes for factor in (shape.a, shape.g) for _ in range(factor.blocks)]
        square = FLOAT64 * sum(n * n for n in dims)
        spared = FLOAT64 * sum(n * (n - 1) // 2 for n in dims)
        counts = FLOAT64 * 2 * 2 * len(shapes)
        assert sent[Phase.FACTOR_COMM] == square - spared + counts
        assert spared > 0.4 * square  # half, but for diagonals: these layers are tiny


def booked(rank: int, world_size: int) -> tuple[int, int]:
    timer, model = PhaseTimer(), torch.nn.Linear(4, 3)
    kfac = KFAC(model, KFACConfig(factor_update_steps=1, inverse_update_steps=1), lr=0.1, timer=timer)
    timer.start()
    model(torch.ones(2, 4)).sum().backward()
    kfac.step()
    timer.stop()
    return sum(timer.drain().sent_bytes.values()), kfac._communicator.traffic.sent_bytes


def test_a_timer_passed_in_books_the_traffic_too(world):
    for on_the_timer, counted in world(2).run(booked):
        assert on_the_timer == counted > 0
