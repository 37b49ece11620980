"""Promise: `status` says in words why Slurm lets a job wait, with Slurm's reason, whatever that is."""

import pytest

from harness.launchers.slurm import scheduler
from harness.launchers.slurm.scheduler import Job, PartitionState, partition_states
from harness.launchers.slurm.scheduler_state import asks_about_nodes, waiting_in_words

SINFO = "main|2|idle\nmain|1|draining\nmain|1|down*\nurgent|3|mixed\nurgent|1|idle*\n"


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("", "job 7_0 waits"),
        ("Licenses", "job 7_0 waits: Licenses"),
        (
            "PartitionDown",
            "job 7_0 waits: partition main is down; it starts when that is up again (PartitionDown)",
        ),
        (
            "Resources",
            "job 7_0 waits: nodes are not free; 2 of 4 nodes of main are drained or down (Resources)",
        ),
        (
            "ReqNodeNotAvail, UnavailableNodes:n[1-4]",
            "job 7_0 waits: nodes that it needs are down, drained or reserved; it starts when they are back; "
            "2 of 4 nodes of main are drained or down (ReqNodeNotAvail)",
        ),
        (
            "JobHeldUser",
            "job 7_0 waits: its user holds it; scontrol release 7 lets it start (JobHeldUser)",
        ),
        ("BeginTime", "job 7_0 waits: Slurm starts a job again only after a pause (BeginTime)"),
    ],
)
def test_a_reason_is_shown_in_words_or_as_it_is(reason, words):
    job = Job("7_0", "PENDING", "PENDING", "", reason, 0, "main")
    assert waiting_in_words(job, {"main": PartitionState(4, 2)}) == words


def test_nodes_that_take_no_jobs_are_counted_by_partition(monkeypatch):
    monkeypatch.setattr(scheduler, "run_command", lambda _words: SINFO)
    assert partition_states() == {"main": PartitionState(4, 2), "urgent": PartitionState(4, 1)}


def test_all_nodes_usable_are_not_mentioned_and_partitions_are_asked_for_only_where_they_explain_something():
    job = Job("7_0", "PENDING", "PENDING", "", "Priority", 0, "main")
    assert (
        waiting_in_words(job, {"main": PartitionState(4, 0)})
        == "job 7_0 waits: other jobs come first (Priority)"
    )
    assert asks_about_nodes(job)
    assert not asks_about_nodes(Job("7_0", "PENDING", "PENDING", "", "BeginTime", 0, "main"))
