"""What a launcher writes into an attempt's folder: how it was launched, and who runs it.

- `launch.json`, a `Launch`: the attempt is PENDING.
- `gang.json`, the presence of the process that will run it, from the moment it lines up for leases.
- `begun.json`, a `RanksStarted`: it has its leases; the attempt is RUNNING.
- `cancel`, a request to end it, made by anyone who can write there; `checkpoint` in it asks to save first.
"""

from __future__ import annotations

import os
import pwd
import sys
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

from harness.cell import Spec
from harness.launchers.process_identity import ProcessIdentity
from harness.launchers.site import Site
from harness.runs.store import Attempt, write_atomically

WORKER_COMMAND = (sys.executable, "-m", "harness.training.worker")


class Launch(Spec):
    """How one attempt is launched, decided when it is submitted.

    Attributes:
        command: starts one rank; the attempt's folder, the rank and the like are appended.
        cpus: CPU numbers of this host that the attempt may lease from.
        gpus: GPU numbers of this host that the attempt may lease from.
        cpus_per_rank: CPUs, and so threads, of each rank.
        oversubscribed: whether the ranks share fewer CPUs than `cpus_per_rank` asks for.
        submitted_at: Unix time, seconds; attempts are started in this order.
        job_id: the job's name in the launcher underneath, once known.
        continues: number of the attempt whose checkpoints it goes on from; None starts anew.
        claim: under Slurm, the name of the claim that the attempt is in.
        claim_job: which job of the claim's array it is in, counted from 0.
    """

    launcher: str
    site: Site
    command: tuple[str, ...] = WORKER_COMMAND
    cpus: tuple[int, ...] = ()
    gpus: tuple[int, ...] = ()
    cpus_per_rank: int
    oversubscribed: bool = False
    host: str
    user: str
    submitted_at: float
    job_id: str | None = None
    continues: int | None = None
    claim: str | None = None
    claim_job: int | None = None

    @classmethod
    def read(cls, attempt: Attempt) -> Self | None:
        """The attempt's launch, or None if it was made but never launched."""
        raw = attempt.read("launch.json")
        return cls.model_validate(raw) if raw is not None else None

    def write(self, attempt: Attempt) -> None:
        """Write `launch.json`: from now on the attempt is pending."""
        attempt.write("launch.json", self.model_dump(mode="json"))


@dataclass(frozen=True)
class RanksStarted:
    """The moment at which an attempt's ranks were started, and the leases that they got.

    Attributes:
        started_at: Unix time, seconds.
        cpus: CPU numbers leased, in order of rank.
        gpus: GPU numbers leased, in order of rank.
    """

    started_at: float
    cpus: tuple[int, ...]
    gpus: tuple[int, ...]

    def write(self, attempt: Attempt) -> None:
        """Write `begun.json`: from now on the attempt is running."""
        attempt.write("begun.json", asdict(self))

    @classmethod
    def read(cls, attempt: Attempt) -> Self | None:
        """The attempt's beginning, or None while it is pending."""
        raw = attempt.read("begun.json")
        return cls(raw["started_at"], tuple(raw["cpus"]), tuple(raw["gpus"])) if raw is not None else None


def user_name() -> str:
    """Of this process, as the system knows it; the number of a user without an entry, as in some containers.

    No environment variable is believed: Slurm is asked about this user's jobs.
    """
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def supervisor_identity(attempt: Attempt) -> ProcessIdentity | None:
    """The process that runs the attempt or waits to, alive or not; None before there was one."""
    raw: dict[str, Any] | None = attempt.read("gang.json")
    return ProcessIdentity.read(raw) if raw is not None else None


def request_cancel(attempt: Attempt, *, checkpoint: bool = False) -> None:
    """Ask whoever runs the attempt to end it, after saving a checkpoint or at once."""
    write_atomically(attempt.path / "cancel", "checkpoint\n" if checkpoint else "")


def cancel_requested(attempt: Attempt) -> Literal["checkpoint", "now"] | None:
    """Whether someone asked for the attempt's end, and how."""
    try:
        wish = (attempt.path / "cancel").read_text()
    except FileNotFoundError:
        return None
    return "checkpoint" if wish.strip() == "checkpoint" else "now"
