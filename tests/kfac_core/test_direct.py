"""Promise: parts sent straight over Gloo arrive as by its own collectives, however uneven, however often."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from kfac_core.collectives import connect, direct

ROUNDS = 5  # back to back, so that a message taken for one of another round would show


def both_ways(rank: int, world_size: int) -> list[tuple[Tensor, Tensor]]:
    """What this rank holds after each exchange, straight and by Gloo's broadcasts and reductions."""
    communicator, everyone = connect(), tuple(range(world_size))
    room = direct._ROOM
    found = []
    for turn in range(ROUNDS):
        draw = torch.Generator().manual_seed(turn)
        sizes = torch.randint(0, 4, (world_size,), generator=draw).mul_(turn * 9000 + 1).tolist()
        values = torch.rand(sum(sizes), generator=draw.manual_seed(100 * turn + rank), dtype=torch.float64)
        straight, gathered = values.clone(), values.clone()
        communicator.gather_parts(straight, sizes, everyone)
        for owner, part in enumerate(gathered.split(sizes)):
            dist.broadcast(part, owner)
        found.append((straight, gathered))
        straight, reduced = values.clone(), values.clone()
        direct._ROOM = room if turn % 2 else 2 * direct._LEAST_PIECE  # whole, or in several pieces
        later = values.clone()
        before, after = communicator.reduce_parts(straight, sizes), communicator.reduce_parts(later, sizes)
        direct._ROOM = room
        after()  # two are under way together, and the second is waited for first
        before()
        reduced.split(sizes)[rank].zero_()
        for owner, part in enumerate(reduced.split(sizes)):
            dist.reduce(part, owner)
        found += [(one.split(sizes)[rank], reduced.split(sizes)[rank]) for one in (straight, later)]
    return found


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_straight_exchanges_equal_gloos_collectives(world, world_size):
    for found in world(world_size).run(both_ways):
        for straight, collective in found:
            torch.testing.assert_close(straight, collective, rtol=1e-14, atol=0)


def sums(rank: int, world_size: int) -> Tensor:
    communicator = connect()
    values = torch.rand(1000 * world_size, generator=torch.Generator().manual_seed(rank))
    communicator.reduce_parts(values, [1000] * world_size)()
    return values.split(1000)[rank]


def test_a_sum_is_added_in_one_order_every_time(world):
    once, again = (world(4).run(sums) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(once, again, strict=True))
