"""Cells whose ranks are `fake_rank.py`, a site, and locks that no other test holds."""

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.cell import Cell
from harness.launchers import LAUNCHERS
from harness.launchers.local.supervisor import supervise_attempt
from harness.launchers.site_profile import Site
from harness.runs.attempt_outcome import Outcome
from harness.runs.records import EvalRecord, to_line
from harness.runs.store import Attempt, sweep_folder

FAKE_RANK = (sys.executable, str(Path(__file__).with_name("fake_rank.py")))


def evaluation_line(step: int, epoch: float, value: float) -> str:
    """A line of rank 0's records."""
    clocks = {"train_seconds": 0.1 * step, "eval_seconds": 0.0, "wall_seconds": 0.1 * step}
    return to_line(EvalRecord(
        0, step, epoch, 840 * step, **clocks, metric="accuracy", value=value, direction="higher",
        train_loss=0.1, learning_rate=0.1,
    ))  # fmt: skip


@pytest.fixture(autouse=True)
def _own_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("KRONSCALE_LOCKS", str(tmp_path / "locks"))
    yield
    for process in psutil.process_iter(["cmdline"]):  # processes of a failed test must not disturb others
        if any(str(tmp_path) in word for word in process.info["cmdline"] or ()):
            process.kill()


@pytest.fixture
def command() -> tuple[str, ...]:
    return FAKE_RANK


@pytest.fixture
def site() -> Site:
    return Site(name="test", oversubscribe=True)


def digits_cell(world_size: int = 1, seed: int = 0, **options: Any) -> Cell:
    return Cell.model_validate({
        "sweep": "study", "method": "sgd", "world_size": world_size, "seed": seed,
        "workload": {"name": "digits", "options": options},
        "target": {"metric": "accuracy", "at_least": 0.97},
        "training": {"global_batch_size": 840, "epochs": 30}, "optimizer": {"lr": 0.1},
    })  # fmt: skip


@pytest.fixture
def make_cell() -> Callable[..., Cell]:
    return digits_cell


@pytest.fixture
def make_attempt(tmp_path: Path, site: Site) -> Callable[..., Attempt]:
    """Stage and plan an attempt as `submit` does, without starting anything."""

    def make(cell: Cell, **site_fields: Any) -> Attempt:
        attempt = sweep_folder("study", tmp_path).stage(cell).new_attempt()
        changed = site.model_copy(update=site_fields)
        LAUNCHERS["local"].plan(cell, changed, FAKE_RANK).write(attempt)
        return attempt

    return make


class SupervisorProcess:
    """A supervisor in a process of its own: a fork, since the modules of a new one take most of its time."""

    def __init__(self, attempt: Attempt) -> None:
        self.attempt = attempt
        context = multiprocessing.get_context("fork")  # no supervisor uses torch, which a fork must not
        self.process = context.Process(target=supervise_attempt, args=(str(attempt.path),))
        self.process.start()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def outcome(self) -> Outcome:
        self.process.join(120)  # a busy machine starts an MPI world in half a minute
        found = self.attempt.outcome()
        assert found is not None
        return found

    def rank_pids(self) -> list[int]:
        return [child.pid for child in psutil.Process(self.pid).children(recursive=True)]


@pytest.fixture
def start_supervisor() -> Iterator[Callable[[Attempt], SupervisorProcess]]:
    supervisors: list[SupervisorProcess] = []

    def start(attempt: Attempt) -> SupervisorProcess:
        supervisors.append(SupervisorProcess(attempt))
        return supervisors[-1]

    yield start
    for supervisor in supervisors:
        supervisor.process.kill()
        supervisor.process.join()


@pytest.fixture
def wait_for() -> Callable[..., None]:
    def wait(condition: Callable[[], Any], seconds: float = 120.0) -> None:
        ends = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < ends, f"not true within {seconds} s"
            time.sleep(0.05)  # a condition may read the states of a study

    return wait


@pytest.fixture
def is_gone() -> Callable[[int], bool]:
    def gone(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    return gone


@pytest.fixture
def cpus() -> int:
    return len(os.sched_getaffinity(0))
