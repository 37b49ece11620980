"""Promise: the disk reserve is large enough for an outcome, whatever the number of ranks."""

import pytest

from harness.launchers.outcome import outcome_without_ranks
from harness.launchers.slurm.disk_reserve import release_reserve, reserve_disk
from harness.runs.records import Outcome, RankExit
from harness.runs.store import Attempt


@pytest.mark.parametrize("world_size", [1, 1000, 4096])
def test_the_outcome_of_all_ranks_fits(tmp_path, world_size):
    attempt = Attempt(tmp_path)
    reserve_disk(attempt, world_size)
    reserved = (tmp_path / ".ballast").stat().st_size
    exits = tuple(RankExit(rank, -9, "SIGKILL", 10_000, "precondition_comm") for rank in range(world_size))
    empty = outcome_without_ranks("NODE_FAIL", "node n1 failed with all ranks there")
    outcome = Outcome(**{**vars(empty), "ranks": exits})
    assert len(outcome.to_json()) <= reserved
    release_reserve(attempt)
    assert not list(tmp_path.iterdir())
