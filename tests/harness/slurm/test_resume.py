"""Promise: a run that a real Slurm interrupts resumes bit for bit, and no clock counts the wait."""

import json

import pytest

from analysis.records.loading import load
from harness.cell import Cell
from harness.launchers.site_profile import Site
from harness.launchers.slurm_profile import SlurmProfile
from harness.runs.store import sweep_folder
from harness.study.status import read_statuses
from harness.study.submit import cancel, retry, submit
from tests.waiting import wait_for

pytestmark = pytest.mark.slurm


@pytest.fixture
def cell():
    """Some seconds of K-FAC on two nodes, a rank on each, which no target ends."""
    return Cell.model_validate({
        "sweep": "study", "method": "mem_opt", "world_size": 2, "workload": "digits",
        "target": {"metric": "accuracy", "at_least": 1.0}, "optimizer": {"lr": 0.1},
        "training": {"global_batch_size": 256, "epochs": 60, "evaluate_every_epochs": 5},
        "kfac": {"strategy": "mem_opt", "damping": 0.01, "factor_update_steps": 2, "inverse_update_steps": 5},
    })  # fmt: skip


def site(**more):
    profile = SlurmProfile(ranks_per_node=1, requeue=True)
    return Site(name="test", launcher="slurm", timeout_minutes=10, slurm=profile, **more)


def digest_of(root, cell):
    return sweep_folder("study", root).cell_folder(cell).latest().read("result.json")["parameters_sha256"]


def look(root):
    return read_statuses(sweep_folder("study", root))[0]


def past(root, number, step):
    seen = look(root)
    return seen.attempt is not None and seen.attempt.number >= number and (seen.step or 0) >= step


def test_a_requeued_and_a_cancelled_run_end_with_the_bits_of_an_uninterrupted_one(on_slurm, tmp_path, cell):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    submit([cell], site(), whole)
    wait_for(lambda: look(whole).state == "COMPLETED", seconds=200)

    submit([cell], site(checkpoint_every_epochs=1), cut)
    wait_for(lambda: past(cut, 1, 20))
    job = on_slurm.run("squeue", "--noheader", "--format=%A").split()[0]
    on_slurm.run("scontrol", "requeue", job)  # SIGTERM to the ranks, SIGKILL after KillWait
    wait_for(lambda: past(cut, 2, 1), seconds=200)
    first, second = sweep_folder("study", cut).cell_folder(cell).attempts()
    assert first.outcome().state == "PREEMPTED"
    resumed_at = second.read("segment.json")["first_step"]
    assert resumed_at == first.outcome().checkpoint_step >= 5

    wait_for(lambda: past(cut, 2, resumed_at + 5))
    cancel([cell], cut, checkpoint=True)
    cancelled = look(cut)
    assert (cancelled.state, cancelled.checkpoint_step) == (
        "CANCELLED",
        cancelled.attempt.outcome().checkpoint_step,
    )
    assert f"with a checkpoint at step {cancelled.checkpoint_step}" in cancelled.cause
    retry([cell], site(), cut)
    wait_for(lambda: look(cut).state == "COMPLETED", seconds=200)

    assert digest_of(cut, cell) == digest_of(whole, cell)
    study, want = load(cut / "study"), load(whole / "study")
    (row,) = study.cells.itertuples()
    assert (row.attempt, row.segments, row.bitwise) == (3, 3, True)
    fields = ["step", "epoch", "samples", "value", "train_loss", "learning_rate"]
    assert study.evaluations[fields].to_dict("list") == want.evaluations[fields].to_dict("list")
    windows = ["rank", "first_step", "steps", "samples"]

    def order(frame):
        return frame[windows].sort_values(windows).to_dict("list")

    assert order(study.windows) == order(want.windows)

    # the clock of the records leaves out the time between segments
    attempts = sweep_folder("study", cut).cell_folder(cell).attempts()
    span = attempts[-1].outcome().ended_at - attempts[0].read("segment.json")["started_at"]
    gaps = [json.loads((one.path / "segment.json").read_text())["away_seconds"] for one in attempts[1:]]
    assert row.away_seconds == pytest.approx(sum(gaps))
    assert study.evaluations["wall_seconds"].max() < span - sum(gaps) + 1
