"""Turns a manifest into a batch script, by submitit, and submits it.

Paths and values of a profile are quoted in the script; only the profile's `setup` lines are not.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Any

from harness.errors import SiteError
from harness.launchers.launch import SHARED_RUNS, job_python
from harness.launchers.ranks.environment import hidden_from_jobs, own_variables
from harness.launchers.slurm.job_layout import slurm
from harness.launchers.slurm.scheduler import NO_ANSWER, NoAnswerError
from harness.runs.stored_files import write_atomically

if TYPE_CHECKING:
    from harness.launchers.site_profile import Site
    from harness.launchers.slurm.submission_manifest import SubmissionManifest

SETUP_FAILED = 231
"""Exit code of a job whose script ended before its supervisor started; no error number is that high."""

_SCRIPT = "sbatch.sh"

_RETRIES = re.compile(r"sleeping|retrying|please wait|pending", re.IGNORECASE)
_PATIENCE_SECONDS = 180.0  # sbatch itself retries for a quarter of an hour where the controller has no room


def batch_text(manifest: SubmissionManifest) -> str:
    """The batch script of a manifest's jobs."""
    from submitit.slurm.slurm import _make_sbatch_string  # noqa: PLC0415  # slow to import

    # Submitit has no public way to get a script without calling sbatch, which `--dry-run` must not. What it
    # prints is submitted, letter for letter.
    text: str = _make_sbatch_string(_command(manifest), manifest.path, **_parameters(manifest))
    if manifest.site.slurm and manifest.site.slurm.signal_seconds:
        return text
    return re.sub(r"#SBATCH --signal=.*\n", "", text)


def write_script(manifest: SubmissionManifest) -> None:
    """Write the batch script that `submit_manifest` submits.

    Raises:
        OSError: the disk is full, for example.
    """
    write_atomically(manifest.path / _SCRIPT, batch_text(manifest))


def submit_manifest(manifest: SubmissionManifest) -> str:
    """Call sbatch with the script that was written; returns the job id.

    Raises:
        SiteError: sbatch refused; nothing was submitted.
        NoAnswerError: Slurm did not answer; the job may have been submitted or not.
    """
    answer = _call(["sbatch", "--parsable", str(manifest.path / _SCRIPT)], manifest.site).stdout
    return answer.strip().partition(";")[0]  # behind it is the cluster, if there are several


def rehearse(text: str, site: Site) -> str:
    """Have sbatch test a batch script; submits nothing.

    Returns:
        The answer of sbatch: when and where the job would start.

    Raises:
        SiteError: sbatch would refuse the script.
        NoAnswerError: Slurm did not answer.
    """
    return " ".join(_call(["sbatch", "--test-only"], site, text).stderr.split())


def _call(command: Sequence[str], site: Site, text: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not hidden_from_jobs(name)}
    try:
        done = _run(command, environment, text)
    except OSError as error:
        raise NoAnswerError(str(error)) from None
    if done.returncode == 0:
        return done
    message = " ".join(done.stderr.split())
    if NO_ANSWER.search(message) or not message:
        raise NoAnswerError(message or f"sbatch ended with {done.returncode}")
    raise SiteError(f"site {site.name}: sbatch refused: {message}")


def _run(
    command: Sequence[str], environment: Mapping[str, str], text: str | None
) -> subprocess.CompletedProcess[str]:
    """Run sbatch, showing what it says while it waits for the controller to take more jobs.

    Raises:
        NoAnswerError: it waited for too long; it was ended, and the job may have been submitted or not.
    """
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True
    ) as process:
        assert process.stdin and process.stdout and process.stderr  # noqa: S101  # as opened above
        errors: list[str] = []
        reader = threading.Thread(target=_pass_on, args=(process.stderr, errors))
        reader.start()
        timer = threading.Timer(_PATIENCE_SECONDS, process.kill)
        timer.start()
        try:
            with suppress(BrokenPipeError):  # it has refused already
                process.stdin.write(text or "")
                process.stdin.close()
            output = process.stdout.read()
        finally:
            waited = not timer.is_alive()
            timer.cancel()
            reader.join()
        code = process.wait()
    if waited and code != 0:
        last = f": {errors[-1].strip()}" if errors else ""
        raise NoAnswerError(f"sbatch waited for more than {_PATIENCE_SECONDS:g} s and was ended{last}")
    return subprocess.CompletedProcess(command, code, output, "".join(errors))


def _pass_on(errors: IO[str], read: list[str]) -> None:
    for line in errors:
        read.append(line)
        if _RETRIES.search(line):
            sys.stderr.write(f"{' '.join(line.split())} (for at most {_PATIENCE_SECONDS:g} s)\n")
            sys.stderr.flush()


def _parameters(manifest: SubmissionManifest) -> dict[str, Any]:
    site, layout = manifest.site, manifest.layout
    profile = slurm(site)
    ranks = layout.ranks_per_node * layout.slots
    options: dict[str, Any] = {"output": "/dev/null", "requeue" if profile.requeue else "no-requeue": True}
    options |= {name: True if value is None else value for name, value in profile.sbatch.items()}
    for name, value in profile.gpu_option(ranks * site.gpus_per_rank).items():
        options[name] = f"{value},{options[name]}" if name in options else value  # gres of other kinds
    memory = layout.memory_mb(site, layout.slots)
    return {
        "job_name": manifest.job_name,
        "partition": profile.partition,
        "account": profile.account,
        "qos": profile.qos,
        "constraint": profile.constraint,
        "wckey": None,  # else submitit has one of its own
        "exclude": ",".join(profile.exclude_nodes) or None,
        "nodes": layout.nodes,
        "ntasks_per_node": ranks,
        "cpus_per_task": site.cpus_per_rank,
        "mem": f"{memory}M" if memory is not None else None,
        "exclusive": profile.exclusive or None,
        "time": layout.minutes(site),
        "map_count": len(manifest.jobs),
        "array_parallelism": 1 if site.one_at_a_time else profile.at_once,
        "signal_delay_s": profile.signal_seconds or 0,
        "stderr_to_stdout": True,
        "use_srun": False,
        "setup": [_log_line(manifest), *_AT_EXIT, *_exports(manifest), *profile.setup],
        "additional_parameters": options,
    }


# Bash runs no trap where exec fails, unless the shell goes on after it.
_AT_EXIT = (
    f'trap \'code=$?; echo "the script of the job ended with $code before its supervisor started"; '
    f"exit {SETUP_FAILED}' EXIT",
    "shopt -s execfail",
)


def _log_line(manifest: SubmissionManifest) -> str:
    folder = shlex.quote(str(manifest.path))
    return f'exec >>{folder}/job-$(printf %05d "$SLURM_ARRAY_TASK_ID").log 2>&1'


def _exports(manifest: SubmissionManifest) -> list[str]:
    """Lines that set the ranks' variables before `setup`, whose lines have the last word."""
    return [f"export {name}={shlex.quote(value)}" for name, value in own_variables(manifest.launch).items()]


def _command(manifest: SubmissionManifest) -> str:
    module = "harness.launchers.slurm.batch_job"
    words = [job_python(manifest.site), "-P", "-u", "-m", module, str(manifest.path)]
    return f"exec {shlex.join([*words, SHARED_RUNS] if manifest.site.shared_runs else words)}"
