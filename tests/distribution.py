"""Which tests run on one worker of pytest-xdist: those of a file, and of files that share a slow start."""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling

TOGETHER = {
    "one cluster": ("tests/harness/slurm/", "tests/harness/test_slurm_cluster.py"),
    "one report": ("tests/analysis/test_figures.py", "tests/analysis/test_report"),
    "MPI worlds": (
        "tests/kfac_core/test_mpi.py",
        "tests/kfac_core/test_split_wait.py",
        "tests/docs/test_examples.py::test_a_python_block_runs_on_two_ranks",
    ),
}
APART = ("tests/harness/launching/", "tests/harness/test_bench.py", "tests/path/")
"""Long tests that share nothing: each runs where a worker is free."""
EARLY = ("tests/kfac_core/test_convolution.py", "tests/analysis/test_broken_records.py")
"""Files of many tests that would be the last to end."""


def group_of(nodeid: str) -> str:
    """Tests of a group run on one worker, one after another."""
    path = nodeid.split("::", maxsplit=1)[0]
    for group, paths in TOGETHER.items():
        if nodeid.startswith(paths):
            return group
    return nodeid if path.startswith(APART) else path


class Scheduling(LoadScopeScheduling):
    """By `group_of`: markers of groups do not reach the scheduler of xdist 3.8 with pytest 9.2."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)
