"""Says in plain words why Slurm lets a job wait, and whether anybody has to do something about it."""

from __future__ import annotations

from collections.abc import Mapping

from harness.launchers.slurm.scheduler import Job, PartitionState

_NODES = "nodes that it needs are down, drained or reserved; it starts when they are back"

# Slurm's reasons, squeue(1), by their beginning; those not listed are shown as they are.
_WORDS: Mapping[str, str] = {
    "PartitionDown": "partition {partition} is down; it starts when that is up again",
    "PartitionInactive": "partition {partition} is inactive; it starts when that is up again",
    "ReqNodeNotAvail": _NODES,
    "Nodes_required_for_job": _NODES,
    "PartitionNodeLimit": "partition {partition} allows fewer nodes; it never starts, so cancel it",
    "PartitionTimeLimit": "partition {partition} allows less time; it never starts, so cancel it",
    "JobHeldUser": "its user holds it; scontrol release {array} lets it start",
    "JobHeldAdmin": "an administrator holds it",
    "JobHoldMaxRequeue": "Slurm has started it again too often; scontrol release {array} lets it start",
    "launch_failed_requeued_held": "a node could not start it; scontrol release {array} lets it start",
    "BeginTime": "Slurm starts a job again only after a pause",
    "Resources": "nodes are not free",
    "Priority": "other jobs come first",
    "JobArrayTaskLimit": "the site's at_once jobs are running",
}
_ABOUT_NODES = ("ReqNodeNotAvail", "Nodes_required_for_job", "Resources", "Priority")


def asks_about_nodes(job: Job) -> bool:
    """Whether the state of its partition's nodes may explain why the job waits."""
    return job.reason.replace(" ", "_").startswith(_ABOUT_NODES)


def waiting_in_words(job: Job, partitions: Mapping[str, PartitionState]) -> str:
    """Why a job waits, such as `job 7_0 waits: partition main is down; ... (PartitionDown)`.

    Args:
        job: that is pending.
        partitions: states of partitions by name; those that are missing are not mentioned.
    """
    reason = job.reason.replace(" ", "_")
    if not reason:
        return f"job {job.id} waits"
    words = next((text for start, text in _WORDS.items() if reason.startswith(start)), None)
    if words is None:
        return f"job {job.id} waits: {job.reason}"
    text = words.format(partition=job.partition, array=job.id.split("_")[0])
    state = partitions.get(job.partition)
    if asks_about_nodes(job) and state is not None and state.unusable:
        text += f"; {state.unusable} of {state.nodes} nodes of {job.partition} are drained or down"
    return f"job {job.id} waits: {text} ({reason.split(',')[0]})"
