"""Worlds of real ranks and a real Slurm, shared by the whole session and started for the first who asks."""

import gc
import logging
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

os.fsync = lambda descriptor: None  # ten milliseconds a file, and no test outlives this machine's crash


# A busy machine is no failure. Hypothesis itself would try 100 examples of each test, for twice the time.
settings.register_profile("kronscale", deadline=None, max_examples=50)
settings.load_profile("kronscale")


def pytest_configure(config: pytest.Config) -> None:
    """Tests read files of the project, such as `jobs/`, wherever the suite was called."""
    os.chdir(config.rootpath)
    # tests load empty studies on purpose; what is not empty must not say so
    config.addinivalue_line("filterwarnings", "ignore:no cell in .* the study is empty:UserWarning")


# Fixtures.
DRAW_EVERY_FIGURE = {"ordinary_report", "saved"}
HARNESS = ("pandas", "harness.training.train")  # what ranks of its tests import
START_RANKS = {"world", "mpi_world", "start_supervisor"}


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests by the fixtures that they use; skip those that need a GPU where there is none."""
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        if "cluster" in fixtures:
            item.add_marker(pytest.mark.slurm)
        if fixtures & START_RANKS:
            item.add_marker(pytest.mark.ranks)
        if fixtures & DRAW_EVERY_FIGURE:
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
    if hasattr(config, "workerinput"):  # a worker of xdist
        items.sort(key=_turn)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Give tests to workers by group."""
    from tests.distribution import Scheduling

    return Scheduling(config, log)


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


def _turn(item: pytest.Item) -> int:
    """Long tests and files start first, so that no worker is left with one at the end."""
    from tests.distribution import EARLY

    markers = ["slurm", "slow", "ranks"]
    early = item.nodeid.startswith(EARLY)
    return next(
        (place for place, name in enumerate(markers) if item.get_closest_marker(name)),
        len(markers) + 1 - early,
    )


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """What commands print does not depend on where the suite runs."""
    monkeypatch.setenv("COLUMNS", "200")


class Logged(logging.Handler):
    """Keeps what K-FAC logs: warnings, or from a lower level on if a test asks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    @property
    def text(self) -> str:
        return "\n".join(self.messages)

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())

    def from_level(self, level: int) -> None:
        logging.getLogger("kfac_core").setLevel(level)


@pytest.fixture
def logged() -> Iterator[Logged]:
    """In place of pytest's own plugin, which visits each of torch's sixty loggers six times in every test."""
    handler, logger = Logged(), logging.getLogger("kfac_core")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


@pytest.fixture
def no_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are drawn but not rendered, which is most of a report's time and the same for every study."""
    from analysis.figures.drawing import Drawing

    monkeypatch.setattr(Drawing, "image", lambda drawing, kind: f"{kind} of {drawing.figure}".encode())


@pytest.fixture(scope="session")
def world() -> Iterator[Callable[[int], World]]:
    """`world(4)` is a world of four processes, started on first use."""
    with _started_on_first_use(lambda size: World(size, *HARNESS)) as of_size:
        yield of_size


@pytest.fixture(scope="session")
def mpi_world() -> Iterator[Callable[[int], World]]:
    """`mpi_world(4)` is an MPI world of four processes, started on first use."""
    with _started_on_first_use(MPIWorld) as of_size:
        yield of_size


@contextmanager
def _started_on_first_use(kind: Callable[[int], World]) -> Iterator[Callable[[int], World]]:
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
