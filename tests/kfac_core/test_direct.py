"""Promise: point-to-point exchanges equal Gloo's collectives, for any part sizes and repetitions."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from kfac_core.collectives import torch_distributed
from kfac_core.collectives.torch_distributed import TorchCommunicator

ROUNDS = 5  # back to back, so that a message taken for one of another round would show


def both_ways(rank: int, world_size: int) -> list[tuple[Tensor, Tensor]]:
    """What this rank holds after each exchange, straight and by Gloo's broadcasts and reductions."""
    communicator, everyone = TorchCommunicator(), tuple(range(world_size))
    compared = []
    for turn in range(ROUNDS):
        draw = torch.Generator().manual_seed(turn)
        sizes = torch.randint(0, 4, (world_size,), generator=draw).mul_(turn * 9000 + 1).tolist()
        values = torch.rand(sum(sizes), generator=draw.manual_seed(100 * turn + rank), dtype=torch.float64)
        straight, gathered = values.clone(), values.clone()
        communicator.gather_parts(straight, sizes, everyone)
        for owner, part in enumerate(gathered.split(sizes)):
            dist.broadcast(part, owner)
        compared.append((straight, gathered))
        straight, reduced, later = values.clone(), values.clone(), values.clone()
        with pytest.MonkeyPatch.context() as patch:
            if turn % 2:  # in several pieces, else whole
                patch.setattr(
                    torch_distributed, "_RECEIVE_ELEMENTS", 2 * torch_distributed._MIN_PIECE_ELEMENTS
                )
            before = communicator.reduce_parts(straight, sizes)
            after = communicator.reduce_parts(later, sizes)
        after()  # two are under way together, and the second is waited for first
        before()
        reduced.split(sizes)[rank].zero_()
        for owner, part in enumerate(reduced.split(sizes)):
            dist.reduce(part, owner)
        compared += [(one.split(sizes)[rank], reduced.split(sizes)[rank]) for one in (straight, later)]
    return compared


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_point_to_point_exchanges_equal_gloos_collectives(world, world_size):
    for compared in world(world_size).run(both_ways):
        for straight, collective in compared:
            torch.testing.assert_close(straight, collective, rtol=1e-14, atol=0)


def sums(rank: int, world_size: int) -> Tensor:
    communicator, size = TorchCommunicator(), 2**17 + 1
    values = torch.rand(size * world_size, generator=torch.Generator().manual_seed(rank))
    communicator.reduce_parts(values, [size] * world_size)()
    return values.split(size)[rank]


def test_a_sum_is_added_in_one_order_every_time(world):
    once, again = (world(4).run(sums) for _ in range(2))
    assert all(torch.equal(*pair) for pair in zip(once, again, strict=True))


def result_before_peers_read(rank: int, _: int) -> tuple[Tensor, Tensor]:
    """The first rank's result while the other one has started, but does not yet read what it was sent."""
    communicator = TorchCommunicator()
    values = torch.arange(2 * 20_000, dtype=torch.float64) + rank
    sent, sizes = values.clone(), [20_000, 20_000]
    pending = communicator.reduce_parts(values, sizes)
    if rank == 0:
        pending.wait()
    dist.barrier()  # not reached by a rank that waits for its own part to be fetched
    if rank == 1:
        pending.wait()
    pending.release()
    return values.split(sizes)[rank], sent.split(sizes)[rank] + (1 - 2 * rank)


def test_waiting_for_a_result_does_not_wait_for_peers_to_read(world):
    for got, want in world(2).run(result_before_peers_read):
        assert torch.equal(got, want)
