"""The report of one rank of the examination's job: its host, and its communication with the other ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Self

from pydantic import TypeAdapter

from harness.runs.store import Attempt

NOT_KNOWN = "not known"
"""Stands for an unknown version, such as the commit if git was too slow."""


@dataclass(frozen=True)
class WorldReport:
    """What a rank measured after it joined the world.

    Attributes:
        backend: carries the traffic.
        joined_seconds: duration of joining.
        no_mpi: why MPI is not used; empty where it is.
        mpi: version of the MPI library, empty if none was started.
        wrong_sum: the wrong and the right sum of an all-reduce; empty if it was right.
        small_seconds: of an all-reduce of 4 B, median.
        large_seconds: of an all-reduce of 4 MiB, median.
        clock_readings: Unix time right after each of several barriers.
        visible_seconds: from a barrier until this rank saw the files that all ranks wrote before it; None if
            it timed out.
        near: ranks whose memory this rank reads.
    """

    backend: str
    joined_seconds: float
    no_mpi: str
    mpi: str
    wrong_sum: str
    small_seconds: float
    large_seconds: float
    clock_readings: tuple[float, ...]
    visible_seconds: float | None
    near: tuple[int, ...] = ()


@dataclass(frozen=True)
class Report:
    """The report of one rank.

    Attributes:
        host: host name.
        node: the scheduler's name of the host.
        versions: of Python, torch, kronscale, and the commit if known.
        device: `cpu`, or the GPU's name.
        device_id: unique id of the GPU that the rank computes on; empty without one.
        gpus: names of the visible GPUs.
        driver: version of the GPU driver, None without one.
        nccl: version; empty if there is none.
        no_nccl: why there is none.
        cpus: CPUs that the rank may run on.
        threads: threads that torch uses.
        memory_limit_bytes: of the control group; None for no limit, as in the next two.
        address_space_bytes: RLIMIT_AS.
        locked_memory_bytes: RLIMIT_MEMLOCK.
        shared_memory_bytes: free in /dev/shm.
        exchange: None if the rank did not join the world.
        python: path of its interpreter.
        code: folder of the package that it runs.
        backends: that its torch was built with.
        data: KRONSCALE_DATA, empty if not set.
        data_seen: whether the rank sees that folder.
    """

    rank: int
    local_rank: int
    host: str
    node: str
    versions: Mapping[str, str]
    device: str
    device_id: str
    gpus: tuple[str, ...]
    driver: str | None
    nccl: str
    no_nccl: str
    cpus: tuple[int, ...]
    threads: int
    memory_limit_bytes: int | None
    address_space_bytes: int | None
    locked_memory_bytes: int | None
    shared_memory_bytes: int
    exchange: WorldReport | None = None
    python: str = ""
    code: str = ""
    backends: tuple[str, ...] = ()
    data: str = ""
    data_seen: bool = False

    def write(self, attempt: Attempt) -> None:
        """Write the report into the attempt's folder; replaces an earlier one of this rank."""
        attempt.write(_name(self.rank), asdict(self))

    @classmethod
    def read(cls, attempt: Attempt, rank: int) -> Self | None:
        """The rank's report, or None if it wrote none."""
        raw = attempt.read(_name(rank))
        return None if raw is None else TypeAdapter(cls).validate_python(raw)


def by_host(reports: Iterable[Report]) -> dict[str, list[Report]]:
    """The reports of each host."""
    found: dict[str, list[Report]] = defaultdict(list)
    for one in reports:
        found[one.host].append(one)
    return found


def by_rank(values: Iterable[tuple[int, str]]) -> str:
    """Each value with its ranks: `torch 2.6 on rank 0; torch 2.7 on rank 1, 2`."""
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, value in values:
        ranks[value].append(rank)
    return "; ".join(f"{value} on rank {', '.join(map(str, of))}" for value, of in ranks.items())


def _name(rank: int) -> str:
    return f"report-{rank:05}.json"
