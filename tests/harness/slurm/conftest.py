"""Cells whose ranks are `fake_rank.py`, on the test cluster, which has no jobs left after a test."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.cell import Cell
from harness.launchers.site_profile import Site
from harness.launchers.slurm_profile import SlurmProfile
from harness.runs.store import Attempt, sweep_folder
from harness.study.cell_states import IN_FLIGHT
from harness.study.status import CellStatus, read_statuses
from tests.slurm_cluster.cluster import Cluster
from tests.waiting import wait_for

FAKE_RANK = (sys.executable, str(Path(__file__).parents[1] / "launching" / "fake_rank.py"))


@pytest.fixture
def on_slurm(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """The cluster, also for commands of this process; its jobs are ended after the test."""
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    yield cluster
    cluster.run("scancel", "--user=root", "--quiet")
    wait_for(lambda: not cluster.run("squeue", "--noheader"), seconds=60)


@pytest.fixture
def make_site() -> Callable[..., Site]:
    def make(timeout_minutes: float = 5.0, **slurm: Any) -> Site:
        profile = SlurmProfile(**{"ranks_per_node": 2, "requeue": False, **slurm})
        return Site(name="test", launcher="slurm", timeout_minutes=timeout_minutes, slurm=profile)

    return make


@pytest.fixture
def make_cell() -> Callable[..., Cell]:
    def make(world_size: int = 4, seed: int = 0, method: str = "sgd", **options: Any) -> Cell:
        return Cell.model_validate({
            "sweep": "study", "method": method, "world_size": world_size, "seed": seed,
            "workload": {"name": "digits", "options": options},
            "target": {"metric": "accuracy", "at_least": 0.97},
            "training": {"global_batch_size": 840, "epochs": 30}, "optimizer": {"lr": 0.1},
        })  # fmt: skip

    return make


@pytest.fixture
def ended(tmp_path: Path) -> Callable[..., list[CellStatus]]:
    """Wait until none of the cells is in flight."""

    def wait(cells: list[Cell], root: Path = tmp_path, seconds: float = 180) -> list[CellStatus]:
        def final() -> list[CellStatus] | None:
            found = read_statuses(sweep_folder("study", root), cells)
            return None if any(one.state in (*IN_FLIGHT, "STAGED") for one in found) else found

        return list(wait_for(final, seconds=seconds))

    return wait


@pytest.fixture
def training(tmp_path: Path) -> Callable[..., Attempt]:
    """Wait until all ranks of the cell's latest attempt are past their second step."""

    def wait(cell: Cell, number: int = 1) -> Attempt:
        def attempt_in_training() -> Attempt | None:
            attempt = sweep_folder("study", tmp_path).cell_folder(cell).latest()
            if attempt is None or attempt.number < number:
                return None
            heartbeats = [attempt.last_heartbeat(rank) for rank in range(cell.world_size)]
            return attempt if all(last is not None and last.step > 1 for last in heartbeats) else None

        found = wait_for(attempt_in_training)
        assert isinstance(found, Attempt)
        return found

    return wait


@pytest.fixture
def look(tmp_path: Path) -> Callable[..., list[CellStatus]]:
    """The current status of cells."""

    def read(*cells: Cell, root: Path = tmp_path) -> list[CellStatus]:
        return read_statuses(sweep_folder("study", root), cells)

    return read
