"""Submission manifest: the attempts of one array of jobs, written before sbatch is called.

    <sweep>/jobs/<manifest>/manifest.json     which attempts, in which job of the array; how they are launched
                           /sbatch.sh         the batch script
                           /submitted.json    the job id, or why sbatch refused; missing if not known
                           /job-00000.log     output of a job's supervisor

The name of the jobs contains the manifest's, so that an interrupted submission can be found again.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field

from harness.launchers.launch import Launch
from harness.launchers.site_profile import Site
from harness.launchers.slurm.job_layout import Job, JobLayout
from harness.runs.store import Attempt, SweepFolder
from harness.runs.stored_files import STRICT, Count, Positive, file_as, make_inside, read_bytes, read_own

_FILE = "manifest.json"


@dataclass(frozen=True)
class SubmissionManifest:
    """The attempts of one array of jobs.

    Attributes:
        path: its folder.
        layout: of its jobs.
        launch: common to all attempts, without the index of the job.
        jobs: attempts as `<cell id>/attempt-<k>`, by job, slot and order in the slot.
        continues: number of the older attempt, for attempts that resume from the checkpoints of one.
        orders: place in the submission, for attempts that have one; empty in older files.
    """

    path: Path
    layout: JobLayout
    launch: Launch
    jobs: Sequence[Job[str]]
    continues: Mapping[str, int] = field(default_factory=dict)
    orders: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def plan(
        cls,
        folder: SweepFolder,
        layout: JobLayout,
        launches: Mapping[Attempt, Launch],
        jobs: Sequence[Job[Attempt]],
    ) -> Self:
        """A new manifest, not written yet; all but `continues` and `order` is taken from the first launch."""
        name = f"{time.strftime('%Y%m%dT%H%M%S')}-{secrets.token_hex(4)}"
        path = folder.path.resolve() / "jobs" / name
        names = [[[_name(attempt) for attempt in slot] for slot in job] for job in jobs]
        attempts = [attempt for job in jobs for slot in job for attempt in slot]
        continues = _known({_name(one): launches[one].continues for one in attempts})
        orders = _known({_name(one): launches[one].order for one in attempts})
        common = {"manifest": name, "continues": None, "order": None}
        return cls(path, layout, launches[attempts[0]].model_copy(update=common), names, continues, orders)

    @classmethod
    def read_to_execute(cls, path: Path, *, shared_runs: bool) -> Self:
        """Read a manifest whose attempts are to be run.

        Raises:
            ForeignError: someone else may have written it, and `shared_runs` is false.
            FileNotFoundError: there is none.
        """
        file = path / _FILE
        return cls._parse(path, read_bytes(file) if shared_runs else read_own(file, path.parent.parent))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the manifest in the folder `path`.

        Raises:
            FileNotFoundError: there is none.
            StoredFileError: it is damaged.
        """
        return cls._parse(path, read_bytes(path / _FILE))

    @classmethod
    def _parse(cls, path: Path, text: bytes) -> Self:
        stored = file_as(_Stored, text, path / _FILE)
        return cls(path, stored.shape, stored.launch, stored.jobs, stored.continues, stored.orders)

    def write(self) -> None:
        """Write `manifest.json`; the attempts are pending once their `launch.json` is written too."""
        with suppress(FileExistsError):
            make_inside(self.path.parent)
        make_inside(self.path)
        launch = self.launch.to_dict()
        content = {"shape": asdict(self.layout), "launch": launch, "jobs": self.jobs}
        of_attempts = {"continues": self.continues, "orders": self.orders}
        Attempt(self.path).write(_FILE, {**content, **of_attempts})

    @property
    def site(self) -> Site:
        """The site as it was at submission."""
        return self.launch.site

    @property
    def sweep(self) -> SweepFolder:
        """The sweep of the attempts."""
        return SweepFolder(self.path.parent.parent)

    @property
    def job_name(self) -> str:
        """Name of its jobs in Slurm, unique to the manifest."""
        return f"kronscale-{self.sweep.path.name}-{self.path.name}"

    @property
    def submitted(self) -> Mapping[str, Any] | None:
        """`job_id` and `cluster`, or `refused` with sbatch's message; None while not known."""
        return Attempt(self.path).read("submitted.json")

    def record_submission(self, **submitted: str) -> None:
        """Write the result of the submission."""
        Attempt(self.path).write("submitted.json", {**submitted, "at": time.time()})

    def slots(self, job: int) -> list[list[Attempt]]:
        """The attempts of one job of the array."""
        return [[Attempt(self.sweep.path / name) for name in slot] for slot in self.jobs[job]]

    def launch_of(self, job: int, attempt: Attempt) -> Launch:
        """Launch of one attempt, for its `launch.json`."""
        name = _name(attempt)
        order = self.orders.get(name, self.launch.order)  # older files have one for all
        own = {"manifest_job": job, "continues": self.continues.get(name), "order": order}
        return self.launch.model_copy(update=own)

    def chain(self, attempt: Attempt) -> list[Attempt]:
        """The attempt and those that resumed it when Slurm started its job again, oldest first."""
        later = [one for one in attempt.cell_folder.attempts() if one.number >= attempt.number]
        return [one for one in later if (one.read("launch.json") or {}).get("manifest") == self.path.name]

    def attempts(self) -> Iterator[tuple[int, Attempt]]:
        """All attempts, each with the number of its job."""
        for number in range(len(self.jobs)):
            yield from ((number, attempt) for slot in self.slots(number) for attempt in slot)


@dataclass(frozen=True)
class _Stored:
    """The content of `manifest.json`."""

    __pydantic_config__ = STRICT
    shape: JobLayout
    launch: Launch
    jobs: list[list[list[Annotated[str, Field(pattern=r"^[^/]+/attempt-[1-9][0-9]*$")]]]]
    continues: dict[str, Positive]
    orders: dict[str, Count] = field(default_factory=dict)


def _name(attempt: Attempt) -> str:
    return f"{attempt.path.parent.name}/{attempt.path.name}"


def _known(numbers: Mapping[str, int | None]) -> dict[str, int]:
    return {name: number for name, number in numbers.items() if number is not None}


def unconfirmed(folder: SweepFolder) -> list[SubmissionManifest]:
    """Manifests of which it is not known whether they were submitted, oldest first."""
    found = sorted((folder.path.resolve() / "jobs").glob(f"*/{_FILE}"))
    return [
        SubmissionManifest.read(path.parent)
        for path in found
        if not (path.parent / "submitted.json").exists()
    ]
