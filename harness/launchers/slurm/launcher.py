"""The Slurm launcher: an attempt is a step of a job, and jobs of equal layout are an array."""

from __future__ import annotations

import shutil
import socket
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from operator import add

from harness.cell import Cell
from harness.errors import SchedulerError, SiteError
from harness.launchers import AttemptState
from harness.launchers.cost import CostEstimate
from harness.launchers.launch import (
    WORKER_COMMAND,
    Launch,
    cancel_requested,
    rank_words,
    request_cancel,
)
from harness.launchers.site_profile import Site
from harness.launchers.slurm.job_layout import lay_out, nodes_of, slurm
from harness.launchers.slurm.sbatch import batch_text, submit_manifest, write_script
from harness.launchers.slurm.scheduler import (
    Job,
    NoAnswerError,
    end_jobs,
    find_array,
    jobs_of,
    this_cluster,
)
from harness.launchers.slurm.scheduler_state import attempt_states, manifest_path
from harness.launchers.slurm.submission_manifest import SubmissionManifest, unconfirmed
from harness.runs.commands import command
from harness.runs.store import Attempt, SweepFolder
from harness.runs.stored_files import refuse_foreign, user_name

_FAILURES = (
    2  # one is chance; a node that failed twice under a sweep would fail every retry, so it is excluded
)


class SlurmLauncher:
    """Submits cells to a cluster's Slurm.

    A manifest of what to run is written before sbatch is called, and the answer of sbatch after it. A
    submission that is interrupted between the two is found again by the name of its jobs.
    """

    poll_seconds = 30.0  # one controller serves all users of a cluster

    def check(self, cell: Cell, site: Site) -> None:
        """Refuse a cell that the site can never run.

        Raises:
            SiteError: its ranks do not spread evenly over nodes of the site, or it has no time limit.
        """
        site.limit_minutes(cell.world_size)
        most = slurm(site).ranks_per_node
        if most > 1 and cell.world_size > most and nodes_of(cell.world_size, most) == cell.world_size:
            raise SiteError(
                f"{cell.id}: {cell.world_size} ranks do not spread evenly over nodes with up to {most} each; "
                f"use another world size, or set slurm.ranks_per_node: 1 on site {site.name}"
            )

    def plan(self, cell: Cell, site: Site, command: Sequence[str] = WORKER_COMMAND) -> Launch:
        """How an attempt at `cell` will be launched, except for its job, which `launch` chooses."""
        return Launch(
            launcher="slurm",
            site=site,
            command=rank_words(site, command),
            cpus_per_rank=site.cpus_per_rank,
            host=socket.gethostname(),
            user=user_name(),
            submitted_at=time.time(),
        )

    def estimate_cost(self, cells: Sequence[Cell], site: Site) -> CostEstimate:
        """Upper bound of the cost of one start of each job."""
        jobs = lay_out(((cell, cell) for cell in cells), site)
        costs = (layout.estimate_cost(site) for layout, found in jobs.items() for _ in found)
        return reduce(add, costs, CostEstimate())

    def preview(self, folder: SweepFolder, cells: Sequence[Cell], site: Site) -> str:
        """The batch scripts that sbatch would get; changes nothing."""
        attempts = {Attempt(folder.cell_folder(cell).path / "attempt-1"): cell for cell in cells}
        launches = {attempt: self.plan(cell, site) for attempt, cell in attempts.items()}
        manifests = _manifests(folder, list(attempts.items()), launches, site)
        return "\n".join(batch_text(manifest) for manifest in manifests)

    def launch(self, folder: SweepFolder, launches: Iterable[tuple[Attempt, Launch]]) -> None:
        """Write manifests of the attempts, make them pending, and call sbatch once per array.

        Raises:
            SiteError: sbatch refused; the refused attempts are as if never launched.
            SchedulerError: Slurm did not answer; what was not submitted waits for `finish_submission`.
        """
        planned = _excluding_bad_nodes(dict(launches))
        site = next(iter(planned.values())).site
        items = [(attempt, attempt.cell_folder.cell()) for attempt in planned]
        manifests = list(_manifests(folder, items, planned, site))
        try:
            for manifest in manifests:
                manifest.write()
                write_script(manifest)
                for number, attempt in manifest.attempts():
                    manifest.launch_of(number, attempt).prepare(attempt)
        except OSError:  # such as a full disk; without its manifests nobody will finish the submission
            for manifest in manifests:
                shutil.rmtree(manifest.path, ignore_errors=True)
            raise
        for manifest in manifests:
            for _, attempt in manifest.attempts():
                Launch.publish(attempt)
        _submit(manifests)

    def interrupted(self, folder: SweepFolder) -> bool:
        """Whether there are manifests of which it is not known whether they were submitted."""
        return bool(unconfirmed(folder))

    def finish_submission(self, folder: SweepFolder, *, shared_runs: bool) -> None:
        """Finish interrupted submissions: find their jobs, or submit them now.

        Raises:
            ForeignError: another user may have written a manifest, and `shared_runs` is false.
            SiteError: as `launch`.
            SchedulerError: as `launch`.
        """
        unsubmitted = []
        for listed in unconfirmed(folder):
            manifest = SubmissionManifest.read_to_execute(listed.path, shared_runs=shared_runs)
            try:
                job_id = find_array(manifest.job_name, manifest.launch.user)
            except NoAnswerError as error:
                raise _no_answer(error, folder, manifest.launch) from None
            if job_id is not None:
                manifest.record_submission(job_id=job_id, **_cluster())
            else:
                _make_pending(manifest)
                write_script(manifest)
                unsubmitted.append(manifest)
        _submit(unsubmitted)

    def starts_pending(self, folder: SweepFolder) -> bool:
        """Whether pending attempts will start without `finish_submission`."""
        return not unconfirmed(folder)

    def attempt_states(self, attempts: Sequence[Attempt]) -> Mapping[Attempt, AttemptState]:
        """States in Slurm of attempts without an outcome."""
        return attempt_states(attempts)

    def cancel(self, attempts: Sequence[Attempt], *, checkpoint: bool = False) -> None:
        """Request the end of attempts; waiting jobs are removed from the queue in one call per array.

        A running job may contain other attempts: its supervisor reads the request and ends only this one.

        Raises:
            SchedulerError: Slurm did not answer, or it is another cluster's; running attempts still end.
            ForeignError: another user may have written which jobs to end; running attempts still end.
        """
        for attempt in attempts:
            request_cancel(attempt, checkpoint=checkpoint)
        try:
            for manifest, indexes in _unwanted(attempts):
                refuse_foreign(manifest.path / "submitted.json", manifest.sweep.path)  # has the job's number
                _refuse_elsewhere(manifest)
                end_jobs((manifest.submitted or {})["job_id"], indexes)
        except NoAnswerError as error:
            again = command("cancel", attempts[0].path.parent.parent)
            raise SchedulerError(f"Slurm did not answer ({error}); to cancel again: {again}") from None


def _refuse_elsewhere(manifest: SubmissionManifest) -> None:
    """Refuse another cluster, where the same job id may belong to another job of this user."""
    cluster = (manifest.submitted or {}).get("cluster")
    if cluster is not None and cluster != (here := this_cluster().name):
        raise SchedulerError(
            f"waiting jobs of {manifest.job_name} are on cluster {cluster}, and this is {here}: cancel "
            "there; running attempts, and those that start, still end"
        )


def _unwanted(attempts: Sequence[Attempt]) -> Iterator[tuple[SubmissionManifest, list[int]]]:
    """Waiting jobs, by array, in which every attempt without an outcome is cancelled.

    A requeued job waits again though it has started: only Slurm knows which jobs those are.
    """
    for path in dict.fromkeys(filter(None, map(manifest_path, attempts))):
        manifest = SubmissionManifest.read(path)
        array = (manifest.submitted or {}).get("job_id")
        if array is None:
            continue
        ending = [number for number in range(len(manifest.jobs)) if _is_unwanted(manifest, number)]
        started = {number for number in ending if _has_started(manifest, number)}
        jobs = jobs_of([array]) if started else {}
        waiting = {number for number in started if _waits(jobs.get(f"{array}_{number}"))}
        indexes = [number for number in ending if number not in started or number in waiting]
        if indexes:
            yield manifest, indexes


def _is_unwanted(manifest: SubmissionManifest, number: int) -> bool:
    chains = [manifest.chain(attempt) for slot in manifest.slots(number) for attempt in slot]
    left = [chain[-1] for chain in chains if chain and chain[-1].outcome() is None]
    return bool(left) and all(map(cancel_requested, left))


def _has_started(manifest: SubmissionManifest, number: int) -> bool:
    return any((attempt.path / "taken.json").exists() for slot in manifest.slots(number) for attempt in slot)


def _waits(job: Job | None) -> bool:
    return job is not None and job.state == "PENDING"


def _manifests(
    folder: SweepFolder, items: Sequence[tuple[Attempt, Cell]], launches: Mapping[Attempt, Launch], site: Site
) -> Iterator[SubmissionManifest]:
    most = slurm(site).array_size
    for layout, jobs in lay_out(items, site).items():
        for start in range(0, len(jobs), most):
            yield SubmissionManifest.plan(folder, layout, launches, jobs[start : start + most])


def _make_pending(manifest: SubmissionManifest) -> None:
    for number, attempt in manifest.attempts():
        if not (attempt.path / "launch.json").exists():
            manifest.launch_of(number, attempt).identified(attempt).write(attempt)


def _submit(manifests: Sequence[SubmissionManifest]) -> None:
    cluster = _cluster() if manifests else {}
    for number, manifest in enumerate(manifests):
        try:
            _record(manifest, submit_manifest(manifest), cluster)
        except SiteError as error:
            for refused in manifests[number:]:
                _withdraw(refused, str(error))
            submitted = sum(len(list(manifest.attempts())) for manifest in manifests[:number])
            raise SiteError(
                f"{error}; {submitted} cells were submitted before" if submitted else str(error)
            ) from None
        except NoAnswerError as error:
            raise _no_answer(error, manifest.sweep, manifest.launch) from None


def _record(manifest: SubmissionManifest, job_id: str, cluster: Mapping[str, str]) -> None:
    try:
        manifest.record_submission(job_id=job_id, **cluster)
    except OSError as error:  # no reason to withdraw the attempts: the job will run them
        again = command("submit", manifest.sweep.path, site=manifest.launch.site.name)
        raise SchedulerError(
            f"{manifest.path / 'submitted.json'}: {error.strerror}; job {job_id} was submitted; to record it "
            f"once the file can be written: {again}"
        ) from None


def _cluster() -> dict[str, str]:
    """Name of the cluster, for `submitted.json`; empty if it is not known."""
    try:
        return {"cluster": this_cluster().name}
    except NoAnswerError:
        return {}


def _withdraw(manifest: SubmissionManifest, why: str) -> None:
    """Undo the launch of attempts that sbatch refused."""
    for _, attempt in manifest.attempts():
        Launch.withdraw(attempt)
    manifest.record_submission(refused=why)


def _no_answer(error: NoAnswerError, folder: SweepFolder, launch: Launch) -> SchedulerError:
    again = command("submit", folder.path, site=launch.site.name)
    return SchedulerError(
        f"Slurm did not answer ({error}); nothing is lost, to finish the submission: {again}"
    )


def bad_nodes(attempts: Iterable[Attempt]) -> tuple[str, ...]:
    """Nodes that failed at least `_FAILURES` times under earlier attempts at the same cells."""
    outcomes = (earlier.outcome() for one in attempts for earlier in one.cell_folder.attempts())
    failures = Counter(node for outcome in outcomes if outcome for node in outcome.failed_nodes)
    return tuple(sorted(node for node, count in failures.items() if count >= _FAILURES))


def _excluding_bad_nodes(launches: Mapping[Attempt, Launch]) -> dict[Attempt, Launch]:
    """The launches with the bad nodes added to the nodes that their site excludes."""
    bad = bad_nodes(launches)
    if not bad:
        return dict(launches)
    site = next(iter(launches.values())).site
    profile = slurm(site)
    excluded = tuple(sorted({*profile.exclude_nodes, *bad}))
    changed = site.model_copy(update={"slurm": profile.model_copy(update={"exclude_nodes": excluded})})
    return {one: launch.model_copy(update={"site": changed}) for one, launch in launches.items()}
