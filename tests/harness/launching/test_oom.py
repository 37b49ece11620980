"""Promise: only messages about memory count as running out of memory."""

import pytest

from harness.launchers.ranks.outcome import slurm_killed


@pytest.mark.parametrize(
    ("output", "killed"),
    [  # messages of slurmstepd and srun 20.11 to 23.11
        (
            "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=7.0. Some of your processes may have",
            True,
        ),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=7.0.", True),
        ("srun: error: n1: task 0: Out Of Memory", True),
        ("srun: error: bloom01: task 3: Killed", False),
        ("srun: error: n1: tasks 0-1: Killed\nthe zoom of the room", False),
        ("", False),
    ],
)
def test_a_kill_is_for_memory_if_slurm_reports_it_and_not_because_of_a_nodes_name(output, killed):
    assert slurm_killed(output) == killed
