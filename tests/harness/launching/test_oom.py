"""Promise: only what says that memory ran out is taken for it."""

import pytest

from harness.launchers.oom import slurm_killed


@pytest.mark.parametrize(
    ("said", "killed"),
    [  # words of slurmstepd and srun 20.11 to 23.11
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
def test_a_kill_is_for_memory_if_slurm_says_so_and_not_by_the_name_of_a_node(said, killed):
    assert slurm_killed(said) == killed
