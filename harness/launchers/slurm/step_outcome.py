"""The outcome of an attempt from the end of its step: what Slurm did explains what the ranks did."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import replace

from harness.launchers.outcome import outcome_of_ranks
from harness.launchers.slurm.step import StepEnd
from harness.runs.attempt_outcome import Outcome
from harness.runs.record_lines import last_lines
from harness.runs.store import Attempt

_FULL_BYTES = 1024 * 1024


def outcome_of_step(attempt: Attempt, end: StepEnd, started_at: float) -> Outcome:
    """The outcome of an attempt whose step has ended.

    Args:
        attempt: read for heartbeats, records and logs; not written.
        end: of the step.
        started_at: Unix time, seconds.
    """
    outcome = outcome_of_ranks(attempt, end.ending, started_at, time.time(), end.out_of_memory)
    if outcome.state != "FAILED" or end.ending.reason != "ranks":
        return outcome
    if end.hung:  # its ranks were killed and left no exit line, but no node failed
        cause = "the ranks hung in MPI's initialization: Slurm's mpi/pmi2 rejected one of their requests"
        return replace(outcome, cause=cause)
    if end.orphaned or end.lost_nodes:
        return _of_nodes(outcome, end)
    if not end.started:
        printed = [line for line in last_lines(attempt.path / "logs" / "srun.log") if line.strip()]
        message = printed[-1].strip() if printed else ""
        cause = f"srun started no rank and ended with {end.exit_code}: {message}"
        return replace(outcome, cause=cause, ranks=())
    if shutil.disk_usage(attempt.path).free < _FULL_BYTES:
        return replace(outcome, cause=f"{outcome.cause}; no space is left on the disk of {attempt.path}")
    return outcome


def in_words(nodes: Sequence[str]) -> str:
    """Such as `node n1` or `nodes n1, n2`."""
    return f"node {nodes[0]}" if len(nodes) == 1 else f"nodes {', '.join(nodes)}"


def _of_nodes(outcome: Outcome, end: StepEnd) -> Outcome:
    if end.orphaned:
        nodes = tuple(sorted(end.orphaned))
        ranks = ", ".join(str(rank) for node in nodes for rank in sorted(end.orphaned[node]))
        what = f"slurmstepd on {in_words(nodes)} is gone, and its ranks ({ranks}) were ended"
    else:
        nodes = end.lost_nodes
        what = f"{in_words(nodes)} failed with all ranks there"
    return replace(outcome, state="NODE_FAIL", cause=f"{what}; {outcome.cause}", failed_nodes=nodes)
