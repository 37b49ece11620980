"""Worlds of real ranks and a real Slurm, shared by the whole session and started for the first who asks."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import settings

from tests.kfac_core.mpi_worlds import MPIWorld
from tests.kfac_core.worlds import World
from tests.slurm_cluster.cluster import PACKAGES, Cluster, missing_programs

if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # as in a shell's background; so it would be in children
    signal.signal(signal.SIGINT, signal.default_int_handler)

torch.set_num_threads(1)  # as in ranks; tiny tensors gain nothing from threads that wait for each other


settings.register_profile("kronscale", deadline=None)  # a busy machine is no failure
settings.load_profile("kronscale")


STARTS_RANKS = {"world", "mpi_world", "start_supervisor"}  # fixtures


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by the fixtures that they use; skip those that need a GPU where there is none."""
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        if "cluster" in fixtures:
            item.add_marker(pytest.mark.slurm)
        if fixtures & STARTS_RANKS:
            item.add_marker(pytest.mark.ranks)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def world() -> Iterator[Callable[[int], World]]:
    """`world(4)` is a world of four processes, started on first use."""
    with _started_on_first_use(World) as of_size:
        yield of_size


@pytest.fixture(scope="session")
def mpi_world() -> Iterator[Callable[[int], World]]:
    """`mpi_world(4)` is an MPI world of four processes, started on first use."""
    with _started_on_first_use(MPIWorld) as of_size:
        yield of_size


@contextmanager
def _started_on_first_use(kind: type[World]) -> Iterator[Callable[[int], World]]:
    worlds: dict[int, World] = {}

    def of_size(world_size: int) -> World:
        if world_size not in worlds:
            worlds[world_size] = kind(world_size)
        return worlds[world_size]

    yield of_size
    for started in worlds.values():
        started.close()


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A running Slurm; a fault that a test causes is mended by that test."""
    if missing := missing_programs():
        reason = f"no {', '.join(missing)}: apt-get install {PACKAGES}"
        if os.environ.get("KRONSCALE_NEEDS_SLURM"):  # continuous integration must not skip what it promises
            pytest.fail(reason)
        pytest.skip(reason)
    with Cluster() as running:
        yield running
