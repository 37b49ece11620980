"""Promise: over Gloo and MPI alike, waiting is what a rank spends until its group's last peer has arrived."""

from __future__ import annotations

import time

import pytest
import torch

from kfac_core.collectives import SingleCommunicator, SplitWait, connect

DELAY, ROUNDS = 0.1, 4  # the machine may delay any rank in one round, hardly in all


def waited(rank: int, world_size: int, over_mpi: bool) -> dict[str, list[float]]:
    """Seconds waited in every round of each kind of collective, the last rank coming late to all of them."""
    if over_mpi:
        from kfac_core.collectives.mpi import MPICommunicator

        inner = MPICommunicator()
    else:
        inner = connect()
    communicator = SplitWait(inner)
    everyone = tuple(range(world_size))
    buffer, sizes = torch.ones(world_size), [1] * world_size
    collectives = {
        "all_reduce": lambda: communicator.all_reduce(buffer),
        "reduce_parts": communicator.reduce_parts(buffer, sizes),
        "gather_parts": lambda: communicator.gather_parts(buffer, sizes, everyone),
        "broadcast": lambda: communicator.broadcast(buffer, 0),
    }
    if world_size == 4:
        row = (0, 1) if rank < 2 else (2, 3)
        communicator.gather_parts(torch.ones(2), [1, 1], row)  # makes the group
        collectives = {"row": lambda: communicator.gather_parts(torch.ones(2), [1, 1], row)}
    seconds: dict[str, list[float]] = {name: [] for name in collectives}
    for name, run in collectives.items():
        for _ in range(ROUNDS):
            communicator.barrier(everyone)
            before = communicator.traffic.wait_seconds or 0.0
            if rank == world_size - 1:
                time.sleep(DELAY)
            run()
            seconds[name].append((communicator.traffic.wait_seconds or 0.0) - before)
    return seconds


@pytest.mark.parametrize(("over_mpi", "world_size"), [(False, 2), (True, 2)])
def test_all_wait_for_the_late_rank_and_it_waits_for_none(world, mpi_world, over_mpi, world_size):
    ranks = mpi_world(world_size) if over_mpi else world(world_size)
    *prompt, late = ranks.run(waited, over_mpi)
    for seconds in prompt:
        assert all(max(rounds) > 0.8 * DELAY for rounds in seconds.values()), seconds
    assert all(0 <= min(rounds) < DELAY / 2 for rounds in late.values()), late


def test_a_row_of_the_grid_does_not_wait_for_another_row(world):
    rows = [seconds["row"] for seconds in world(4).run(waited, False)]
    assert max(rows[2]) > 0.8 * DELAY
    assert max(min(rows[0]), min(rows[1]), min(rows[3])) < DELAY / 2


def test_barriers_are_not_counted_as_traffic():
    inner = SingleCommunicator()
    assert inner.traffic.wait_seconds is None
    split = SplitWait(inner)
    assert split.traffic is inner.traffic
    split.all_reduce(torch.ones(3))
    assert (inner.traffic.calls, inner.traffic.sent_bytes) == (0, 0)
    assert inner.traffic.wait_seconds is not None
