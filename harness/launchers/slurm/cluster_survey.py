"""What a cluster says of itself: asked once, for those who want to know before they submit."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from harness.launchers.slurm.scheduler import NoAnswerError, ask

COMMANDS = ("sbatch", "srun", "squeue", "scancel", "scontrol", "sinfo")
"""What submitting, looking and cancelling need."""


@dataclass(frozen=True)
class Partition:
    """One partition.

    Attributes:
        default: whether jobs that name none get it.
        up: whether it starts jobs.
        limit_minutes: longest job; None for any.
        nodes: that it has.
        usable_nodes: of them, those that are not down or drained.
        largest_job: most nodes of a job; None for any.
    """

    name: str
    default: bool
    up: bool
    limit_minutes: float | None
    nodes: int
    usable_nodes: int
    largest_job: int | None


@dataclass(frozen=True)
class Survey:
    """A cluster's answers.

    Attributes:
        missing: commands that are not installed.
        settings: of the controller, as `scontrol show config` names them.
        partitions: that this user may see.
        mpi_types: what srun takes for `--mpi`.
        silence: by question (`controller`, `accounting`, `partitions`, `mpi`) why there was no answer.
    """

    missing: tuple[str, ...]
    settings: Mapping[str, str]
    partitions: tuple[Partition, ...]
    mpi_types: tuple[str, ...]
    silence: Mapping[str, str]


def survey() -> Survey:
    """Ask the cluster; what does not answer is noted."""
    silence: dict[str, str] = {}

    def answer(question: str, *words: str) -> str:
        try:
            return ask(words)
        except NoAnswerError as error:
            silence[question] = str(error)
            return ""

    settings = answer("controller", "scontrol", "show", "config")
    partitions = answer(
        "partitions", "sinfo", "--all", "--noheader", "--summarize", "--format=%P|%a|%l|%F|%s"
    )
    types = answer("mpi", "srun", "--mpi=list")
    answer("accounting", "sacct", "--allocations", "--noheader", "--starttime=now-1hour", "--format=JobID")
    return Survey(
        missing=tuple(name for name in COMMANDS if shutil.which(name) is None),
        settings=dict(read_settings(settings)),
        partitions=tuple(map(read_partition, partitions.split())),
        mpi_types=read_mpi_types(types),
        silence=silence,
    )


def read_settings(text: str) -> Iterator[tuple[str, str]]:
    """Pairs out of `scontrol show config`."""
    for line in text.splitlines():
        name, sign, value = line.partition("=")
        if sign:
            yield name.strip(), value.strip()


def read_partition(line: str) -> Partition:
    """One line of what `survey` asks sinfo for, such as `main*|up|1:00:00|2/1/1/4|1-infinite`."""
    name, available, limit, counts, sizes = line.split("|")
    allocated, idle, _, total = (int(_number(count)) for count in counts.split("/"))
    largest = sizes.split("-")[-1]
    return Partition(
        name=name.rstrip("*"),
        default=name.endswith("*"),
        up=available == "up",
        limit_minutes=read_minutes(limit),
        nodes=total,
        usable_nodes=allocated + idle,
        largest_job=int(largest) if largest.isdigit() else None,
    )


def read_minutes(limit: str) -> float | None:
    """Slurm's way of writing a time, `days-hours:minutes:seconds` with the front left out; None for any."""
    days, _, clock = limit.rpartition("-")
    parts = clock.split(":")
    if not all(part.isdigit() for part in parts):
        return None
    hours, minutes, seconds = (0, 0, 0, *map(int, parts))[-3:]
    return (int(days or 0) * 24 + hours) * 60 + minutes + seconds / 60


def read_mpi_types(text: str) -> tuple[str, ...]:
    """The names in `srun --mpi=list`, whose sentences end in `...` or stand before a colon."""
    words = re.sub(r"^.*(\.\.\.|:)", "", text, flags=re.MULTILINE)
    return tuple(re.findall(r"[a-z0-9_]+", words))


def _number(count: str) -> float:
    """`1.5K` is how sinfo writes 1,500 nodes."""
    return float(count[:-1]) * 1000 if count.endswith("K") else float(count)
