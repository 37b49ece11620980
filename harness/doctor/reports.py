"""What a rank of the examination's job reports: its host first, then what it found among the others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from harness.runs.store import Attempt

NOT_KNOWN = "not known"
"""Stands for a version that a rank could not find out, such as a commit where git was too slow."""


@dataclass(frozen=True)
class Exchange:
    """What a rank found once it had joined the others.

    Attributes:
        backend: that carries the traffic.
        joined_seconds: from asking to join to being in.
        no_mpi: why MPI carries nothing; empty where it does.
        mpi: version of the MPI library, empty where none was started.
        wrong_sum: what an all-reduce gave and should have given; empty where that is the same.
        small_seconds: of an all-reduce of 4 B, median.
        large_seconds: of one of 4 MiB, median.
        clock_readings: Unix time right after each of several barriers.
        visible_seconds: from a barrier until this rank saw the file that each had written before it; None if
            it gave up.
        near: ranks whose memory it reads in exchanges.
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
    """One rank.

    Attributes:
        host: its kernel's name for itself.
        node: its scheduler's name for it.
        versions: of Python, torch, kronscale, and its commit where known.
        device: `cpu`, or the GPU's name.
        device_id: of the GPU that it computes on, unlike any other's; empty without one.
        gpus: names of those that it sees.
        driver: version of the GPU driver, None without one.
        nccl: version; empty where there is none.
        no_nccl: why not.
        cpus: that it may run on.
        threads: that torch uses.
        memory_limit_bytes: of its control group, None for any; as the next two.
        address_space_bytes: RLIMIT_AS.
        locked_memory_bytes: RLIMIT_MEMLOCK.
        shared_memory_bytes: free in /dev/shm.
        exchange: None if it never came so far.
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
    exchange: Exchange | None = None

    def write(self, attempt: Attempt) -> None:
        """Write it into the attempt's folder, in place of an earlier one of this rank."""
        attempt.write(_name(self.rank), asdict(self))

    @classmethod
    def read(cls, attempt: Attempt, rank: int) -> Self | None:
        """The rank's report, or None if it left none."""
        raw: dict[str, Any] | None = attempt.read(_name(rank))
        if raw is None:
            return None
        lists = {name: tuple(raw[name]) for name in ("gpus", "cpus")}
        exchange = raw["exchange"]
        if exchange is not None:
            listed = {name: tuple(exchange[name]) for name in ("clock_readings", "near")}
            exchange = Exchange(**exchange | listed)
        return cls(**{**raw, **lists, "exchange": exchange})


def by_host(reports: Iterable[Report]) -> dict[str, list[Report]]:
    """The reports of each host."""
    found: dict[str, list[Report]] = defaultdict(list)
    for one in reports:
        found[one.host].append(one)
    return found


def by_rank(said: Iterable[tuple[int, str]]) -> str:
    """Who says what: `torch 2.6 on rank 0; torch 2.7 on rank 1, 2`."""
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, words in said:
        ranks[words].append(rank)
    return "; ".join(f"{words} on rank {', '.join(map(str, who))}" for words, who in ranks.items())


def _name(rank: int) -> str:
    return f"report-{rank:05}.json"
