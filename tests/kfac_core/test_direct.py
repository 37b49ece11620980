"""Promise: point-to-point exchanges equal Gloo's collectives, for any part sizes, repetitions and hosts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from harness.training.world.single_copy import find_readable_peers
from kfac_core.collectives import direct
from kfac_core.collectives.torch_distributed import TorchCommunicator

ROUNDS = 5  # back to back, so that a message taken for one of another round would show


def on_hosts(rank: int, world_size: int, ranks_per_host: int) -> TorchCommunicator:
    """A communicator that takes its world for so many ranks a host."""
    communicator = TorchCommunicator(find_peers=find_readable_peers if ranks_per_host > 1 else None)
    assert communicator.readable_peers == (set(range(world_size)) - {rank} if ranks_per_host > 1 else set())
    host = set(range(world_size)[rank // ranks_per_host * ranks_per_host :][:ranks_per_host])
    communicator._all_readable = ranks_per_host >= world_size
    communicator._peers = [
        peer if place in host else replace(peer, process=None)
        for place, peer in enumerate(communicator._peers)
    ]
    return communicator


def both_ways(rank: int, world_size: int, ranks_per_host: int) -> list[tuple[Tensor, Tensor]]:
    """What this rank holds after each exchange, straight and by Gloo's broadcasts and reductions."""
    communicator, everyone = on_hosts(rank, world_size, ranks_per_host), tuple(range(world_size))
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct, "_CACHED_ELEMENTS", 5000)
        for turn in range(ROUNDS):
            draw = torch.Generator().manual_seed(turn)
            sizes = torch.randint(0, 4, (world_size,), generator=draw).mul_(turn * 9000 + 1).tolist()
            values = torch.rand(
                sum(sizes), generator=draw.manual_seed(100 * turn + rank), dtype=torch.float64
            )
            straight, gathered = values.clone(), values.clone()
            communicator.gather_parts(straight, sizes, everyone)
            for owner, part in enumerate(gathered.split(sizes)):
                dist.broadcast(part, owner)
            found.append((straight, gathered))
            straight, reduced, later = values.clone(), values.clone(), values.clone()
            with patch.context() as pieces:
                if turn % 2:  # in several pieces, else whole
                    pieces.setattr(direct, "_RECEIVE_ELEMENTS", 2 * direct._MIN_PIECE_ELEMENTS)
                before = communicator.reduce_parts(straight, sizes)
                after = communicator.reduce_parts(later, sizes)
            after()  # two are under way together, and the second is waited for first
            before()
            reduced.split(sizes)[rank].zero_()
            for owner, part in enumerate(reduced.split(sizes)):
                dist.reduce(part, owner)
            summed = values.clone()
            dist.all_reduce(summed)
            for elements in (summed.numel(), 2 * world_size, 1):  # the last is less than a part each
                one, two = values[:elements].clone(), values[:elements].clone()
                finish_one, finish_two = (
                    communicator.all_reduce_async(one),
                    communicator.all_reduce_async(two),
                )
                finish_one()
                finish_two()
                found += [(one, summed[:elements]), (two, summed[:elements])]
            found += [(one.split(sizes)[rank], reduced.split(sizes)[rank]) for one in (straight, later)]
    return found


@pytest.mark.parametrize(
    ("world_size", "ranks_per_host"), [(2, 1), (2, 2), (3, 1), (3, 2), (3, 3), (4, 1), (4, 2), (4, 3), (4, 4)]
)
def test_point_to_point_exchanges_equal_gloos_collectives(world, world_size, ranks_per_host):
    for found in world(world_size).run(both_ways, ranks_per_host):
        for straight, collective in found:
            torch.testing.assert_close(straight, collective, rtol=1e-14, atol=0)


def sums(rank: int, world_size: int, ranks_per_host: int) -> tuple[Tensor, Tensor]:
    communicator, size = on_hosts(rank, world_size, ranks_per_host), 2 * direct._CACHED_ELEMENTS + 1
    values = torch.rand(size * world_size, generator=torch.Generator().manual_seed(rank))
    everywhere = values.clone()
    communicator.reduce_parts(values, [size] * world_size)()
    communicator.all_reduce(everywhere)
    return values.split(size)[rank], everywhere


@pytest.mark.parametrize("ranks_per_host", [1, 2, 4])
def test_a_sum_is_added_in_one_order_every_time(world, ranks_per_host):
    once, again = (world(4).run(sums, ranks_per_host) for _ in range(2))
    for (part, everywhere), (same_part, same) in zip(once, again, strict=True):
        assert torch.equal(part, same_part)
        assert torch.equal(everywhere, same)
        assert torch.equal(everywhere, once[0][1]), "no two ranks may differ in a bit"


def result_before_peers_read(rank: int, world_size: int, ranks_per_host: int) -> tuple[Tensor, Tensor]:
    """The first rank's result while the other one has started, but does not yet read what it was sent."""
    communicator = on_hosts(rank, world_size, ranks_per_host)
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


@pytest.mark.parametrize("ranks_per_host", [1, 2])
def test_waiting_for_a_result_does_not_wait_for_peers_to_read(world, ranks_per_host):
    for got, want in world(2).run(result_before_peers_read, ranks_per_host):
        assert torch.equal(got, want)
