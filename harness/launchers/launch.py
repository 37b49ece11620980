"""Files of a launcher in an attempt's folder: how the attempt was launched, and which process runs it.

- `launch.json`, a `Launch`: the attempt is PENDING.
- `supervisor.json`, the identity of the supervisor process, written before it waits for locks.
- `begun.json`, a `RanksStarted`: the attempt has its locks and is RUNNING.
- `cancel`, a request to end the attempt, by anyone who can write there; `checkpoint` in it means: save first.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import stat
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

import psutil
from pydantic import AliasChoices, Field

from harness.cell import Spec
from harness.errors import StoredFileError
from harness.launchers.site_profile import Site
from harness.runs.store import Attempt
from harness.runs.stored_files import (
    STRICT,
    Count,
    Positive,
    Seconds,
    file_as,
    read_bytes,
    read_own,
    write_atomically,
)

SHARED_RUNS = "--shared-runs"
"""Word of the command lines of queues and of jobs whose site has `shared_runs`."""

WORKER_COMMAND = (sys.executable, "-P", "-m", "harness.training.worker")  # no module of the working folder


def rank_words(site: Site, command: Sequence[str]) -> tuple[str, ...]:
    """The command of a rank on `site`: behind its prefix, and with its Python in place of this one."""
    program = site.python if site.python is not None and command[0] == sys.executable else command[0]
    return (*site.launch_prefix, program, *command[1:])


def job_python(site: Site) -> str:
    """The Python of the processes that start ranks, which are outside of any container."""
    return site.python if site.python is not None and not site.launch_prefix else sys.executable


class Launch(Spec):
    """How one attempt is launched, decided when it is submitted.

    Attributes:
        command: starts one rank; the attempt's folder, the rank and more options are appended.
        cpus: CPU numbers of this host of which the attempt may lock some.
        gpus: GPU numbers of this host of which the attempt may lock some.
        cpus_per_rank: CPUs, and so threads, of each rank.
        oversubscribed: whether the ranks share fewer CPUs than `cpus_per_rank` requires.
        submitted_at: Unix time, seconds; attempts are started in this order.
        job_id: in files up to 0.1.0, the job's id in submitit.
        continues: number of the attempt from whose checkpoints this one resumes; None starts from scratch.
        order_seed: seed of the random order in which the cells of a block were submitted together; None in
            older files.
        order: its place in that submission, from 0.
        continuation: how many time limits the run has met since it was submitted or retried.
        progressed: whether the attempt before such a continuation saved a checkpoint of its own.
        budget: name of the budget of its submission in `budgets/`; None if it has none, or is not continued.
        id: random name of the attempt, which no attempt in another run folder has; None in older files.
        continues_id: `id` of the attempt that `continues` names.
        manifest: under Slurm, the submission manifest that lists the attempt; `claim` in older files.
        manifest_job: index of its job in the manifest's array; `claim_job` in older files.
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
    order_seed: int | None = None
    order: int | None = None
    continuation: int = 0
    progressed: bool = True
    budget: str | None = None
    id: str | None = None
    continues_id: str | None = None
    manifest: str | None = Field(default=None, validation_alias=AliasChoices("manifest", "claim"))
    manifest_job: int | None = Field(default=None, validation_alias=AliasChoices("manifest_job", "claim_job"))

    @classmethod
    def read(cls, attempt: Attempt) -> Self | None:
        """The attempt's launch; None if the attempt was never launched.

        Raises:
            StoredFileError: `launch.json` is not a launch.
        """
        return attempt.read_as(cls, "launch.json")

    @classmethod
    def read_to_execute(cls, attempt: Attempt, *, shared_runs: bool) -> Self:
        """The launch of an attempt whose command is to be executed.

        Args:
            attempt: the attempt.
            shared_runs: of the site that the submission named, not of the site in the file.

        Raises:
            ForeignError: someone else may have written it, and `shared_runs` is false.
            FileNotFoundError: the attempt was never launched.
            StoredFileError: `launch.json` is not a launch.
        """
        path = attempt.path / "launch.json"
        return file_as(
            cls, read_bytes(path) if shared_runs else read_own(path, attempt.path.parent.parent), path
        )

    def identified(self, attempt: Attempt) -> Self:
        """The launch with a new identity of its attempt, and the identity of the one that it continues."""
        before = Attempt(attempt.path.with_name(f"attempt-{self.continues}")).read("launch.json") or {}
        return self.model_copy(update={"id": secrets.token_hex(8), "continues_id": before.get("id")})

    def prepare(self, attempt: Attempt) -> None:
        """Write the launch under another name, so that `publish` takes no space on the disk.

        Raises:
            OSError: the disk is full, for example; the attempt is not pending.
        """
        attempt.write(_prepared(), self.identified(attempt).to_dict())

    @staticmethod
    def publish(attempt: Attempt) -> None:
        """Make the prepared `launch.json` visible: from now on the attempt is pending."""
        (attempt.path / _prepared()).replace(attempt.path / "launch.json")

    @staticmethod
    def withdraw(attempt: Attempt) -> None:
        """Make an attempt that nothing has started as if it had never been launched."""
        for name in ("launch.json", _prepared()):
            (attempt.path / name).unlink(missing_ok=True)

    def write(self, attempt: Attempt) -> None:
        """Write `launch.json`: from now on the attempt is pending."""
        attempt.write("launch.json", self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """For a JSON file."""
        return self.model_dump(mode="json")


def _prepared() -> str:
    """Name of this process's own: where locks do not work, two may submit the same cell."""
    return f".launch.json.{socket.gethostname()}-{os.getpid()}"


@dataclass(frozen=True)
class RanksStarted:
    """When an attempt's ranks were started, and the CPUs and GPUs that they got.

    Attributes:
        started_at: Unix time, seconds.
        cpus: CPU numbers, in order of rank.
        gpus: GPU numbers, in order of rank.
    """

    __pydantic_config__ = STRICT
    started_at: Seconds
    cpus: tuple[Count, ...]
    gpus: tuple[Count, ...]

    def write(self, attempt: Attempt) -> None:
        """Write `begun.json`: from now on the attempt is running."""
        attempt.write("begun.json", asdict(self))

    @classmethod
    def read(cls, attempt: Attempt) -> Self | None:
        """Start of the attempt's ranks; None while it is pending.

        Raises:
            StoredFileError: `begun.json` is damaged.
        """
        return attempt.read_as(cls, "begun.json")


def supervisor_identity(attempt: Attempt) -> ProcessIdentity | None:
    """The process that runs the attempt or waits for locks, alive or not; None before there was one.

    Raises:
        StoredFileError: `supervisor.json` is damaged.
    """
    return attempt.read_as(ProcessIdentity, "supervisor.json")


def request_cancel(attempt: Attempt, *, checkpoint: bool = False) -> None:
    """Request that the attempt be ended, after saving a checkpoint or at once."""
    path = attempt.path / "cancel"
    if checkpoint:
        write_atomically(path, "checkpoint\n")
    else:  # an empty file takes no space, so a full disk does not prevent it
        mode = stat.S_IRUSR | stat.S_IWUSR | attempt.path.stat().st_mode & stat.S_IRGRP
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, mode))


def cancel_requested(attempt: Attempt) -> Literal["checkpoint", "now"] | None:
    """How the attempt was requested to end; None if it was not."""
    try:
        request = read_bytes(attempt.path / "cancel")
    except FileNotFoundError:
        return None
    except StoredFileError:  # whatever it is, somebody put it there
        return "now"
    return "checkpoint" if request.strip() == b"checkpoint" else "now"


_CLOCK_TOLERANCE_SECONDS = 2.0  # creation times are relative to a boot time that clock corrections move


@dataclass(frozen=True)
class ProcessIdentity:
    """A process on a host; its creation time tells it from a later one with the same number.

    Attributes:
        created: Unix time at which the process was created, seconds.
    """

    __pydantic_config__ = STRICT
    host: str
    pid: Positive
    created: Seconds

    @classmethod
    def mine(cls) -> Self:
        """This process."""
        return cls(socket.gethostname(), os.getpid(), psutil.Process().create_time())

    def to_dict(self) -> dict[str, Any]:
        """For a JSON file."""
        return asdict(self)

    def alive(self) -> bool:
        """Whether the process is alive; a process on another host cannot be checked and counts as alive."""
        if self.host != socket.gethostname():
            return True
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.created) < _CLOCK_TOLERANCE_SECONDS
            return same and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def terminate(self) -> bool:
        """Send SIGTERM; returns whether the process was alive on this host."""
        if self.host != socket.gethostname() or not self.alive():
            return False
        try:
            os.kill(self.pid, signal.SIGTERM)
        except ProcessLookupError:
            return False
        return True
