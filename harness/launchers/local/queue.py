"""The local queue: submits a sweep's pending attempts to submitit, one after the other.

`python -m harness.launchers.local.queue SWEEP_FOLDER [--shared-runs]`, started by the local launcher and
detached from it. An attempt that another user may have written is left alone without `--shared-runs`.
submitit's local executor starts a job at once, so the queue submits an attempt only when the one before has
its locks. At most one supervisor of a sweep waits for locks; it starts while other attempts run, unless the
site runs cells one at a time: starting it takes half a second of CPU time, which the attempt that is timed
could count as foreign. A killed queue loses nothing: supervisors continue, and the next queue starts from the
files.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import submitit

from harness.errors import ForeignError, StoredFileError
from harness.launchers.launch import SHARED_RUNS, Launch, ProcessIdentity, RanksStarted, supervisor_identity
from harness.launchers.local.supervisor import supervise_attempt
from harness.runs.attempt_outcome import Outcome
from harness.runs.locks import exclusive, take
from harness.runs.store import Attempt, SweepFolder

_POLL_SECONDS = 0.05
_YEAR_MINUTES = 365 * 24 * 60  # submitit's limit includes waiting for locks; supervisors have their own


def run_queue(folder: SweepFolder, *, shared_runs: bool = False) -> None:
    """Submit pending attempts until there is none; returns at once if the sweep has a queue already."""
    lock = take(folder.path / "queue.lock")
    if lock is None:
        return
    jobs: list[Any] = []
    with lock:
        identity = folder.path / "queue.json"
        Attempt(folder.path).write(identity.name, ProcessIdentity.mine().to_dict())
        while True:
            for attempt in pending(folder, shared_runs=shared_runs):
                job = _submit(attempt, shared_runs=shared_runs)
                jobs.append(job)
                _wait_until_started(attempt, jobs)
                _wait_until_ended_if_alone(attempt, job)
            # Under the submit lock: attempts added now are seen here, or their submitter sees no queue.
            with exclusive(folder.path / "submit.lock"):
                if not any(pending(folder, shared_runs=shared_runs)):
                    identity.unlink()
                    lock.close()
                    return


def pending(folder: SweepFolder, *, shared_runs: bool = False) -> Iterator[Attempt]:
    """Attempts that wait to be submitted, in order of submission; checked again before each is yielded.

    Without `shared_runs` those that another user may have written are left out; `status` names them.
    """
    waiting = []
    for attempt in filter(None, (cell_folder.latest() for cell_folder in folder.cell_folders())):
        launch = _pending_launch(attempt, shared_runs=shared_runs)
        if launch is not None:
            waiting.append((launch.submitted_at, attempt.path))
    for _, path in sorted(waiting):
        if _pending_launch(Attempt(path), shared_runs=shared_runs) is not None:
            yield Attempt(path)


def _pending_launch(attempt: Attempt, *, shared_runs: bool) -> Launch | None:
    """The launch of an attempt that waits to be submitted here; None of any other."""
    try:
        launch = Launch.read_to_execute(attempt, shared_runs=shared_runs) if _is_pending(attempt) else None
    except (ForeignError, FileNotFoundError):
        return None
    except StoredFileError as error:  # never started; `status` shows why
        print(f"kronscale: passed over: {error}", file=sys.stderr, flush=True)
        return None
    return launch if launch is not None and launch.launcher == "local" else None


def _is_pending(attempt: Attempt) -> bool:
    if (attempt.path / "outcome.json").exists() or (attempt.path / "begun.json").exists():
        return False
    supervisor = supervisor_identity(attempt)
    return supervisor is None or not supervisor.alive()


def _submit(attempt: Attempt, *, shared_runs: bool) -> Any:
    attempt.make_folder("submitit")
    executor = submitit.LocalExecutor(folder=attempt.path / "submitit")
    executor.update_parameters(timeout_min=_YEAR_MINUTES, tasks_per_node=1, gpus_per_node=0)
    return executor.submit(supervise_attempt, str(attempt.path), shared_runs=shared_runs)


def _wait_until_started(attempt: Attempt, jobs: list[Any]) -> None:
    job = jobs[-1]
    while not (attempt.outcome() or RanksStarted.read(attempt)):
        if job.done() and not (attempt.outcome() or RanksStarted.read(attempt)):
            now = time.time()
            log = Path(job.paths.stderr).relative_to(attempt.path)
            cause = f"the launcher's job {job.job_id} ended before it started a rank; see {log}"
            attempt.write_outcome(Outcome("FAILED", cause, None, "error", now, now))
        time.sleep(_POLL_SECONDS)
    jobs[:] = [job for job in jobs if not job.done()]  # `done` also reaps the finished ones


def _wait_until_ended_if_alone(attempt: Attempt, job: Any) -> None:
    launch = Launch.read(attempt)
    if launch is not None and launch.site.one_at_a_time:
        while not (attempt.outcome() or job.done()):
            time.sleep(_POLL_SECONDS)


if __name__ == "__main__":
    os.environ["PYTHONSAFEPATH"] = "1"  # as `-P`, for submitit's process of each attempt
    os.umask(os.umask(0) | 0o022)  # nobody else may write what supervisors and ranks make
    run_queue(SweepFolder(Path(sys.argv[1])), shared_runs=SHARED_RUNS in sys.argv[2:])
