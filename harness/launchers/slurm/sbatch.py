"""From a claim to the text that sbatch gets, through submitit, and to the job's number.

No path and no word of a profile stands in the text unquoted, but for the profile's own `setup` lines.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from harness.errors import SiteError
from harness.launchers.rank_environment import kept_from_jobs
from harness.launchers.slurm.job_layout import slurm
from harness.launchers.slurm.scheduler import NoAnswerError

if TYPE_CHECKING:
    from harness.launchers.site import Site
    from harness.launchers.slurm.executor import ManifestExecutor
    from harness.launchers.slurm.submission_manifest import SubmissionManifest

# What sbatch says when it may or may not have been heard; anything else that it says is a refusal.
_NO_ANSWER = re.compile(
    r"unable to contact|timed out|connection|transmitted|slurm controller|communication|temporarily|"
    r"authentication|munge|no respon",
    re.IGNORECASE,
)


def batch_text(claim: SubmissionManifest) -> str:
    """What sbatch will get."""
    return _executor(claim).text(_command(claim))


def submit_manifest(claim: SubmissionManifest) -> str:
    """Call sbatch; returns the job's number.

    Raises:
        SiteError: sbatch refused; nothing was submitted.
        NoAnswerError: Slurm did not answer; the job may be there or not.
    """
    script = claim.path / "sbatch.sh"
    script.write_text(batch_text(claim))
    executor = _executor(claim)
    return executor.job_id(_call(executor.command(script), claim.site).stdout)


def rehearse(text: str, site: Site) -> str:
    """Ask sbatch what it would do with a text; submits nothing.

    Returns:
        Its words: when and where the job would start.

    Raises:
        SiteError: it would refuse.
        NoAnswerError: Slurm did not answer.
    """
    return " ".join(_call(["sbatch", "--test-only"], site, text).stderr.split())


def _call(command: Sequence[str], site: Site, text: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not kept_from_jobs(name)}
    try:
        done = subprocess.run(
            command, env=environment, input=text, capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise NoAnswerError(str(error)) from None
    if done.returncode == 0:
        return done
    said = " ".join(done.stderr.split())
    if _NO_ANSWER.search(said) or not said:
        raise NoAnswerError(said or f"sbatch ended with {done.returncode}")
    raise SiteError(f"site {site.name}: sbatch refused: {said}")


def _executor(claim: SubmissionManifest) -> ManifestExecutor:
    from harness.launchers.slurm.executor import ManifestExecutor  # noqa: PLC0415  # see there

    executor = ManifestExecutor(claim.path)
    executor.parameters.update(_parameters(claim))
    return executor


def _parameters(claim: SubmissionManifest) -> dict[str, Any]:
    site, shape = claim.site, claim.shape
    profile = slurm(site)
    ranks = shape.ranks_per_node * shape.slots
    more: dict[str, Any] = {"output": "/dev/null", "requeue" if profile.requeue else "no-requeue": True}
    more |= profile.gpu_option(ranks * site.gpus_per_rank)
    more |= {name: True if value is None else value for name, value in profile.sbatch.items()}
    memory = shape.memory_mb(site, shape.slots)
    return {
        "job_name": claim.job_name,
        "partition": profile.partition,
        "account": profile.account,
        "qos": profile.qos,
        "constraint": profile.constraint,
        "wckey": profile.wckey,
        "exclude": ",".join(profile.exclude_nodes) or None,
        "nodes": shape.nodes,
        "ntasks_per_node": ranks,
        "cpus_per_task": site.cpus_per_rank,
        "mem": f"{memory}M" if memory is not None else None,
        "exclusive": profile.exclusive or None,
        "time": shape.minutes(site),
        "map_count": len(claim.jobs),
        "array_parallelism": profile.at_once,
        "signal_delay_s": profile.signal_seconds or 0,
        "stderr_to_stdout": True,
        "use_srun": False,
        "setup": [_log_line(claim), *profile.setup],
        "additional_parameters": more,
    }


def _log_line(claim: SubmissionManifest) -> str:
    folder = shlex.quote(str(claim.path))
    return f'exec >>{folder}/job-$(printf %05d "$SLURM_ARRAY_TASK_ID").log 2>&1'


def _command(claim: SubmissionManifest) -> str:
    words = [sys.executable, "-u", "-m", "harness.launchers.slurm.batch_job", str(claim.path)]
    return f"exec {shlex.join(words)}"
