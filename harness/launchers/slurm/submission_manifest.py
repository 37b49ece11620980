"""A claim: attempts that one sbatch is to run, written down before it is called.

    <sweep>/jobs/<claim>/claim.json        which attempts, in which job of the array; how they are launched
                        /sbatch.sh         the text that sbatch got
                        /submitted.json    its job id, or why it was refused; absent if nobody knows
                        /job-00000.log     what a job's supervisor said

The claim's name is in its jobs' name, so a submission that was interrupted after sbatch is found again.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from harness.launchers.launch import Launch
from harness.launchers.site import Site
from harness.launchers.slurm.job_layout import Job, JobLayout
from harness.runs.store import Attempt, SweepFolder


@dataclass(frozen=True)
class SubmissionManifest:
    """One claim.

    Attributes:
        path: its folder.
        shape: of its jobs.
        launch: of every attempt, but for its place in the array.
        jobs: attempts by job, lane and turn, as `<cell id>/attempt-<k>`.
        continues: for those attempts that go on from an older one's checkpoints, its number.
    """

    path: Path
    shape: JobLayout
    launch: Launch
    jobs: Sequence[Job[str]]
    continues: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def plan(
        cls,
        folder: SweepFolder,
        shape: JobLayout,
        launches: Mapping[Attempt, Launch],
        jobs: Sequence[Job[Attempt]],
    ) -> Self:
        """A new claim, of which nothing is written yet; all its launches are alike but for `continues`."""
        name = f"{time.strftime('%Y%m%dT%H%M%S')}-{secrets.token_hex(4)}"
        path = folder.path.resolve() / "jobs" / name
        names = [[[_name(attempt) for attempt in lane] for lane in job] for job in jobs]
        mine = [attempt for job in jobs for lane in job for attempt in lane]
        continues = {_name(one): launches[one].continues for one in mine}
        launch = launches[mine[0]].model_copy(update={"claim": name, "continues": None})
        return cls(path, shape, launch, names, {k: v for k, v in continues.items() if v is not None})

    @classmethod
    def read(cls, path: Path) -> Self:
        """The claim that was written to the folder `path`.

        Raises:
            FileNotFoundError: there is none.
        """
        raw = Attempt(path).read("claim.json")
        if raw is None:
            raise FileNotFoundError(f"{path / 'claim.json'}: a claim without it was never made")
        return cls(
            path,
            JobLayout(**raw["shape"]),
            Launch.model_validate(raw["launch"]),
            raw["jobs"],
            raw["continues"],
        )

    def write(self) -> None:
        """From now on its attempts are for its jobs alone; they are pending once they say so too."""
        self.path.mkdir(parents=True)
        launch = self.launch.model_dump(mode="json")
        content = {"shape": asdict(self.shape), "launch": launch, "jobs": self.jobs}
        Attempt(self.path).write("claim.json", {**content, "continues": self.continues})

    @property
    def site(self) -> Site:
        """As it was when it was submitted."""
        return self.launch.site

    @property
    def sweep(self) -> SweepFolder:
        """Whose attempts it is about."""
        return SweepFolder(self.path.parent.parent)

    @property
    def job_name(self) -> str:
        """What its jobs are called in Slurm; unlike that of any other claim."""
        return f"kronscale-{self.sweep.path.name}-{self.path.name}"

    @property
    def submitted(self) -> Mapping[str, Any] | None:
        """`job_id` and `cluster`, or `refused` with sbatch's words; None while nobody knows."""
        return Attempt(self.path).read("submitted.json")

    def settle(self, **submitted: str) -> None:
        """Write down what became of the submission."""
        Attempt(self.path).write("submitted.json", {**submitted, "at": time.time()})

    def slots(self, job: int) -> list[list[Attempt]]:
        """The attempts of one job of the array."""
        return [[Attempt(self.sweep.path / name) for name in lane] for lane in self.jobs[job]]

    def launch_of(self, job: int, attempt: Attempt) -> Launch:
        """What the attempt's own `launch.json` says."""
        own = {"claim_job": job, "continues": self.continues.get(_name(attempt))}
        return self.launch.model_copy(update=own)

    def chain(self, attempt: Attempt) -> list[Attempt]:
        """The attempt and those that go on in its place when Slurm starts its job again, oldest first."""
        later = [one for one in attempt.cell_folder.attempts() if one.number >= attempt.number]
        return [one for one in later if (one.read("launch.json") or {}).get("claim") == self.path.name]

    def attempts(self) -> Iterator[tuple[int, Attempt]]:
        """All attempts, each with the number of its job."""
        for number in range(len(self.jobs)):
            yield from ((number, attempt) for lane in self.slots(number) for attempt in lane)


def _name(attempt: Attempt) -> str:
    return f"{attempt.path.parent.name}/{attempt.path.name}"


def unsettled(folder: SweepFolder) -> list[SubmissionManifest]:
    """Claims of which nobody knows whether sbatch heard of them, oldest first."""
    found = sorted((folder.path.resolve() / "jobs").glob("*/claim.json"))
    return [
        SubmissionManifest.read(path.parent)
        for path in found
        if not (path.parent / "submitted.json").exists()
    ]
