"""The Slurm launcher: attempts become steps of jobs, and jobs of equal shape one array."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from operator import add

from harness.cell import Cell
from harness.errors import SchedulerError, SiteError
from harness.launchers.attempt_state import AttemptState
from harness.launchers.cost_estimate import CostEstimate
from harness.launchers.launch import WORKER_COMMAND, Launch, cancel_requested, request_cancel, user_name
from harness.launchers.site import Site
from harness.launchers.slurm.bad_nodes import keep_away
from harness.launchers.slurm.job_layout import lay_out, nodes_of, slurm
from harness.launchers.slurm.sbatch import batch_text, submit_manifest
from harness.launchers.slurm.scheduler import (
    Job,
    NoAnswerError,
    cluster_name,
    end_jobs,
    find_array,
    jobs_of,
)
from harness.launchers.slurm.scheduler_state import fates, manifest_path
from harness.launchers.slurm.submission_manifest import SubmissionManifest, unsettled
from harness.runs.store import Attempt, SweepFolder


class SlurmLauncher:
    """Hands cells to a cluster's Slurm.

    What is to run is written down, as a claim, before sbatch is called, and what sbatch said after it. A
    submission that is interrupted between the two is found again by its jobs' name.
    """

    def check(self, cell: Cell, site: Site) -> None:
        """Refuse a cell that the site can never run.

        Raises:
            SiteError: its ranks do not spread evenly over nodes of the site.
        """
        most = slurm(site).ranks_per_node
        if most > 1 and cell.world_size > most and nodes_of(cell.world_size, most) == cell.world_size:
            raise SiteError(
                f"{cell.id}: {cell.world_size} ranks do not spread evenly over nodes with up to {most} each; "
                f"use another world size, or set slurm.ranks_per_node: 1 on site {site.name}"
            )

    def plan(self, cell: Cell, site: Site, command: Sequence[str] = WORKER_COMMAND) -> Launch:
        """How an attempt at `cell` will be launched, but for its job, which `launch` decides."""
        return Launch(
            launcher="slurm",
            site=site,
            command=tuple(command),
            cpus_per_rank=site.cpus_per_rank,
            host=socket.gethostname(),
            user=user_name(),
            submitted_at=time.time(),
        )

    def hours(self, cells: Sequence[Cell], site: Site) -> CostEstimate:
        """The most that the cells can cost."""
        jobs = lay_out(((cell, cell) for cell in cells), site)
        return reduce(add, (shape.hours(site) * len(found) for shape, found in jobs.items()), CostEstimate())

    def preview(self, folder: SweepFolder, cells: Sequence[Cell], site: Site) -> str:
        """The texts that sbatch would get; changes nothing."""
        attempts = {Attempt(folder.cell_folder(cell).path / "attempt-1"): cell for cell in cells}
        launches = {attempt: self.plan(cell, site) for attempt, cell in attempts.items()}
        claims = _claims(folder, list(attempts.items()), launches, site)
        return "\n".join(batch_text(claim) for claim in claims)

    def launch(self, folder: SweepFolder, launches: Iterable[tuple[Attempt, Launch]]) -> None:
        """SubmissionManifest the attempts, make them pending, and call sbatch once an array.

        Raises:
            SiteError: sbatch refused; what it refused is as if never launched.
            SchedulerError: Slurm did not answer; what it did not hear of waits for `resume`.
        """
        planned = keep_away(dict(launches))
        site = next(iter(planned.values())).site
        items = [(attempt, attempt.cell_folder.cell()) for attempt in planned]
        claims = list(_claims(folder, items, planned, site))
        for claim in claims:
            claim.write()
        for claim in claims:
            _make_pending(claim)
        _hand_over(claims)

    def interrupted(self, folder: SweepFolder) -> bool:
        """Whether there are claims of which nobody knows whether sbatch heard of them."""
        return bool(unsettled(folder))

    def resume(self, folder: SweepFolder) -> None:
        """Finish submissions that were interrupted: find their jobs, or hand them over now.

        Raises:
            SiteError: as `launch`.
            SchedulerError: as `launch`.
        """
        unheard = []
        for claim in unsettled(folder):
            try:
                job_id = find_array(claim.job_name, claim.launch.user)
            except NoAnswerError as error:
                raise _no_answer(error) from None
            if job_id is not None:
                claim.settle(job_id=job_id, **_cluster())
            else:
                _make_pending(claim)
                unheard.append(claim)
        _hand_over(unheard)

    def works_on(self, folder: SweepFolder) -> bool:
        """Whether pending attempts will start without `resume`."""
        return not unsettled(folder)

    def fates(self, attempts: Sequence[Attempt]) -> Mapping[Attempt, AttemptState]:
        """What Slurm says of attempts without an outcome, in at most two calls."""
        return fates(attempts)

    def cancel(self, attempts: Sequence[Attempt], *, checkpoint: bool = False) -> None:
        """Ask for the end of attempts; jobs that wait are taken out of the queue, in one call.

        A running job may have other attempts in it: its supervisor sees the request, and ends the one.

        Raises:
            SchedulerError: Slurm did not answer, or is another cluster's; running attempts end all the same.
        """
        for attempt in attempts:
            request_cancel(attempt, checkpoint=checkpoint)
        try:
            for claim, indexes in _unwanted(attempts):
                _refuse_elsewhere(claim)
                end_jobs((claim.submitted or {})["job_id"], indexes)
        except NoAnswerError as error:
            raise _no_answer(error) from None


def _refuse_elsewhere(claim: SubmissionManifest) -> None:
    """Another cluster may have given the same number to something else of this user's."""
    cluster = (claim.submitted or {}).get("cluster")
    if cluster is not None and cluster != (here := cluster_name()):
        raise SchedulerError(
            f"waiting jobs of {claim.job_name} are on cluster {cluster}, and this is {here}: cancel there; "
            f"what runs, and what starts, ends all the same"
        )


def _unwanted(attempts: Sequence[Attempt]) -> Iterator[tuple[SubmissionManifest, list[int]]]:
    """Jobs of arrays of `attempts` that wait and have nothing left but what is cancelled.

    A job that Slurm took the nodes of waits again, though it has begun: only Slurm knows which those are.
    """
    for path in dict.fromkeys(filter(None, map(manifest_path, attempts))):
        claim = SubmissionManifest.read(path)
        array = (claim.submitted or {}).get("job_id")
        if array is None:
            continue
        ending = [number for number in range(len(claim.jobs)) if _is_unwanted(claim, number)]
        begun = {number for number in ending if _has_begun(claim, number)}
        jobs = jobs_of([claim.launch.user]) if begun else {}
        waiting = {number for number in begun if _waits(jobs.get(f"{array}_{number}"))}
        indexes = [number for number in ending if number not in begun or number in waiting]
        if indexes:
            yield claim, indexes


def _is_unwanted(claim: SubmissionManifest, number: int) -> bool:
    chains = [claim.chain(attempt) for lane in claim.slots(number) for attempt in lane]
    left = [chain[-1] for chain in chains if chain and chain[-1].outcome() is None]
    return bool(left) and all(map(cancel_requested, left))


def _has_begun(claim: SubmissionManifest, number: int) -> bool:
    return any((attempt.path / "taken.json").exists() for lane in claim.slots(number) for attempt in lane)


def _waits(job: Job | None) -> bool:
    return job is not None and job.state == "PENDING"


def _claims(
    folder: SweepFolder, items: Sequence[tuple[Attempt, Cell]], launches: Mapping[Attempt, Launch], site: Site
) -> Iterator[SubmissionManifest]:
    most = slurm(site).array_size
    for shape, jobs in lay_out(items, site).items():
        for start in range(0, len(jobs), most):
            yield SubmissionManifest.plan(folder, shape, launches, jobs[start : start + most])


def _make_pending(claim: SubmissionManifest) -> None:
    for number, attempt in claim.attempts():
        if not (attempt.path / "launch.json").exists():
            claim.launch_of(number, attempt).write(attempt)


def _hand_over(claims: Sequence[SubmissionManifest]) -> None:
    cluster = _cluster() if claims else {}
    for number, claim in enumerate(claims):
        try:
            claim.settle(job_id=submit_manifest(claim), **cluster)
        except SiteError as error:
            for refused in claims[number:]:
                _withdraw(refused, str(error))
            heard = sum(len(list(claim.attempts())) for claim in claims[:number])
            raise SiteError(
                f"{error}; {heard} cells were submitted before" if heard else str(error)
            ) from None
        except NoAnswerError as error:
            raise _no_answer(error) from None


def _cluster() -> dict[str, str]:
    """For `submitted.json`: which cluster to ask; empty if it does not say, and then nobody compares."""
    try:
        return {"cluster": cluster_name()}
    except NoAnswerError:
        return {}


def _withdraw(claim: SubmissionManifest, why: str) -> None:
    """Undo what made the attempts pending: they were never launched."""
    for _, attempt in claim.attempts():
        (attempt.path / "launch.json").unlink(missing_ok=True)
    claim.settle(refused=why)


def _no_answer(error: NoAnswerError) -> SchedulerError:
    return SchedulerError(
        f"Slurm did not answer ({error}); nothing is lost: kronscale submit finishes what was begun"
    )
