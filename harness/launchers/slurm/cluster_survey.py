"""Queries a cluster's commands, settings and partitions, for checks before submitting."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from harness.launchers.slurm.scheduler import NoAnswerError, run_command

COMMANDS = ("sbatch", "srun", "squeue", "scancel", "scontrol", "sinfo")
"""Commands that `submit`, `status` and `cancel` need."""


@dataclass(frozen=True)
class Partition:
    """A partition of the cluster.

    Attributes:
        default: whether jobs without a partition get it.
        up: whether jobs can start in it.
        limit_minutes: longest job; None for any.
        nodes: number of nodes.
        usable_nodes: nodes that are not down or drained.
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
    """Answers of a cluster.

    Attributes:
        missing: commands that are not installed.
        settings: of the controller, as `scontrol show config` names them.
        partitions: visible to this user.
        mpi_types: values that srun accepts for `--mpi`.
        errors: by query (`controller`, `accounting`, `partitions`, `mpi`) why there was no answer.
    """

    missing: tuple[str, ...]
    settings: Mapping[str, str]
    partitions: tuple[Partition, ...]
    mpi_types: tuple[str, ...]
    errors: Mapping[str, str]


def survey() -> Survey:
    """Query the cluster; queries without an answer are in `errors`."""
    errors: dict[str, str] = {}

    def answer(query: str, *words: str) -> str:
        try:
            return run_command(words)
        except NoAnswerError as error:
            errors[query] = str(error)
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
        errors=errors,
    )


def read_settings(text: str) -> Iterator[tuple[str, str]]:
    """Name and value pairs of `scontrol show config`."""
    for line in text.splitlines():
        name, sign, value = line.partition("=")
        if sign:
            yield name.strip(), value.strip()


def read_partition(line: str) -> Partition:
    """One line of the output of sinfo in `survey`, such as `main*|up|1:00:00|2/1/1/4|1-infinite`."""
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
    """Minutes of a limit written as `days-hours:minutes:seconds`, leading parts optional; None for any."""
    days, _, clock = limit.rpartition("-")
    parts = clock.split(":")
    if not all(part.isdigit() for part in parts):
        return None
    hours, minutes, seconds = (0, 0, 0, *map(int, parts))[-3:]
    return (int(days or 0) * 24 + hours) * 60 + minutes + seconds / 60


def read_mpi_types(text: str) -> tuple[str, ...]:
    """Names in the output of `srun --mpi=list`, without its sentences, which end in `...` or a colon."""
    words = re.sub(r"^.*(\.\.\.|:)", "", text, flags=re.MULTILINE)
    return tuple(re.findall(r"[a-z0-9_]+", words))


def _number(count: str) -> float:
    """A count of sinfo, which writes 1,500 nodes as `1.5K`."""
    return float(count[:-1]) * 1000 if count.endswith("K") else float(count)
