"""Runs attempts as steps of Slurm jobs, submitted through Submitit."""

from harness.launchers.slurm.job_layout import slurm
from harness.launchers.slurm.sbatch import rehearse
from harness.launchers.slurm.scheduler import NoAnswerError, end_named, jobs_of
from harness.launchers.slurm.scheduler_state import job_log, scheduler_ids
from harness.launchers.slurm.submission_manifest import unconfirmed

__all__ = [
    "NoAnswerError",
    "end_named",
    "job_log",
    "jobs_of",
    "rehearse",
    "scheduler_ids",
    "slurm",
    "unconfirmed",
]
