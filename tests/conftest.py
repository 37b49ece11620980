"""Worlds of real ranks, shared by the whole session."""

from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import settings

from tests.kfac_core.worlds import World

torch.set_num_threads(1)  # as in ranks; tiny tensors gain nothing from threads that wait for each other


settings.register_profile("kronscale", deadline=None)  # a busy machine is no failure
settings.load_profile("kronscale")


@pytest.fixture(scope="session")
def world() -> Iterator[Callable[[int], World]]:
    """`world(4)` is a world of four processes, started on first use."""
    worlds: dict[int, World] = {}

    def of_size(world_size: int) -> World:
        if world_size not in worlds:
            worlds[world_size] = World(world_size)
        return worlds[world_size]

    yield of_size
    for started in worlds.values():
        started.close()
