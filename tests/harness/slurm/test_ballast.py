"""Promise: the room kept free for an outcome is enough for it, whatever the number of ranks."""

import pytest

from harness.launchers.slurm.ballast import drop_ballast, lay_ballast
from harness.launchers.verdict import without_ranks
from harness.records import Outcome, RankExit
from harness.store import Attempt


@pytest.mark.parametrize("world_size", [1, 1000, 4096])
def test_the_outcome_of_all_ranks_fits(tmp_path, world_size):
    attempt = Attempt(tmp_path)
    lay_ballast(attempt, world_size)
    kept = (tmp_path / ".ballast").stat().st_size
    exits = tuple(RankExit(rank, -9, "SIGKILL", 10_000, "precondition_comm") for rank in range(world_size))
    empty = without_ranks("NODE_FAIL", "node n1 failed with all ranks there")
    outcome = Outcome(**{**vars(empty), "ranks": exits})
    assert len(outcome.to_json()) <= kept
    drop_ballast(attempt)
    assert not list(tmp_path.iterdir())
