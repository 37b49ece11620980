"""Worlds of real ranks and a real Slurm, shared by the whole session and started for the first who asks."""

import gc
import os
import signal
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import settings

from tests import started_ranks
from tests.kfac_core.mpi_worlds import MPIWorld
from tests.kfac_core.worlds import World
from tests.slurm_cluster.cluster import PACKAGES, Cluster, missing_programs

if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # as in a shell's background; so it would be in children
    signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ["pytester"]
started_ranks.watch()

torch.set_num_threads(1)  # as in ranks; tiny tensors gain nothing from threads that wait for each other


settings.register_profile("kronscale", deadline=None)  # a busy machine is no failure
settings.load_profile("kronscale")


STARTS_RANKS = {"world", "mpi_world", "start_supervisor"}  # fixtures
GROUPS = {"cluster": "slurm", "mpi_world": "mpi", "ordinary_report": "report"}
"""Fixtures that take long to make, and the group of all tests that share one under xdist."""


@pytest.hookimpl(tryfirst=True)  # before `-m` selects, and before xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests by the fixtures that they use, group those that share one, skip those without their GPU."""
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        if "cluster" in fixtures:
            item.add_marker(pytest.mark.slurm)
        if fixtures & STARTS_RANKS:
            item.add_marker(pytest.mark.ranks)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        if not item.get_closest_marker("xdist_group") and (group := _group(item)):
            item.add_marker(pytest.mark.xdist_group(group))
    if hasattr(config, "workerinput"):  # a worker of xdist
        items.sort(key=_turn)


def pytest_runtest_logstart() -> None:
    """A test answers for what it starts, its fixtures included."""
    started_ranks.seen.clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Fail a test that starts ranks and is not marked: it would slow `make test-fast` down."""
    result = yield
    if started_ranks.seen and not any(item.get_closest_marker(name) for name in ("ranks", "slurm", "slow")):
        pytest.fail(f"this test starts ranks; mark it `ranks`: {'; '.join(started_ranks.seen)}")
    return result


def pytest_collection_finish() -> None:
    """Collections of garbage need not go through what importing all tests has made."""
    gc.collect()
    gc.freeze()


def _group(item: pytest.Item) -> str | None:
    """Tests of a group run on one worker; those of none run wherever a worker is free."""
    if item.get_closest_marker("slurm"):
        return "slurm"  # one cluster, whose daemons a test may stop
    information = getattr(item, "_fixtureinfo", None)  # none in other kinds of items, as doctests
    definitions = information.name2fixturedefs if information else {}
    shared = {
        name
        for name, (*_, last) in definitions.items()
        if last.scope in ("module", "session") and last.func.__module__.startswith("tests")
    } - {"world"}  # every worker starts its own, once
    whole = [group for name, group in GROUPS.items() if name in shared]
    return whole[0] if whole else str(item.path) if shared else None


def _turn(item: pytest.Item) -> int:
    """Long groups start first, so that no worker is left with one at the end."""
    markers = ["slurm", "slow", "ranks", "xdist_group"]
    return next((place for place, name in enumerate(markers) if item.get_closest_marker(name)), len(markers))


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """What commands print does not depend on where the suite runs."""
    monkeypatch.setenv("COLUMNS", "200")


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
