"""What else runs on the CPUs of a run: CPU seconds of foreign processes, stolen ones, and the clock.

The kernel counts the busy time of each CPU in `/proc/stat`, and that of each process in `/proc/<pid>/stat`.
What remains of the first without the ranks of this run, and what they have started, is foreign: other users,
other runs, and the launcher of this one. Interrupts are left out, because a run's own traffic makes them.
Both count in ticks of 10 ms, so a window of less than a second says little; sums over a run are what counts.
What rounding leaves below zero in a window is taken from the next ones: else short windows would add it up.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from harness.training.world import World

PROC = Path("/proc")
CPUS = Path("/sys/devices/system/cpu")

_USER, _NICE, _SYSTEM, _STEAL = 0, 1, 2, 7  # columns of a CPU's line in /proc/stat
_UTIME, _STIME, _CHILD_UTIME, _CHILD_STIME = 11, 12, 13, 14  # of /proc/<pid>/stat, after the command's name


@dataclass(frozen=True)
class _Reading:
    """Seconds since the host started, and of `elapsed` since any fixed moment."""

    elapsed: float
    busy: float
    steal: float
    host_busy: float
    own: float
    host_own: float


class LoadGauge:
    """Reads the load between two calls of `read`, on the CPUs that the rank may use and on the whole host.

    Ranks that may use the same CPUs, as when there are more ranks than CPUs, count as one: none of them is
    foreign to the others.

    Args:
        cpus: CPU numbers of this rank, and of the ranks that share some of them.
        sharing: process ids of the ranks on these CPUs.
        on_host: process ids of all ranks of the run on this host.
    """

    def __init__(self, cpus: Collection[int], sharing: Collection[int], on_host: Collection[int]) -> None:
        self._cpus, self._sharing, self._on_host = frozenset(cpus), frozenset(sharing), frozenset(on_host)
        self._tick = os.sysconf("SC_CLK_TCK")
        self._host_cpus = 0
        self._debts = {"foreign": 0.0, "host_foreign": 0.0}
        self._last = self._now()

    def read(self) -> dict[str, float] | None:
        """CPU seconds since the last call, by kind; None where `/proc` does not tell.

        Returns:
            `capacity`: elapsed time times the number of CPUs. `foreign`: busy with other processes. `steal`:
            taken by the hypervisor for other virtual machines. `host_capacity` and `host_foreign`: the same
            over all CPUs of the host.
        """
        before, self._last = self._last, self._now()
        if before is None or self._last is None:
            return None
        now = self._last
        elapsed = now.elapsed - before.elapsed
        busy, own = now.busy - before.busy, now.own - before.own
        host_busy, host_own = now.host_busy - before.host_busy, now.host_own - before.host_own
        return {
            "capacity": elapsed * len(self._cpus),
            "foreign": self._without_debt("foreign", busy - own, len(self._cpus)),
            "steal": max(0.0, now.steal - before.steal),
            "host_capacity": elapsed * self._host_cpus,
            "host_foreign": self._without_debt("host_foreign", host_busy - host_own, self._host_cpus),
        }

    def _without_debt(self, kind: str, seconds: float, cpus: int) -> float:
        """`seconds`, less by what earlier windows were below zero, at most two ticks a CPU."""
        owed = seconds + self._debts[kind]
        self._debts[kind] = min(0.0, max(owed, -2 * cpus / self._tick))
        return max(0.0, owed)

    def clock_mhz(self) -> float | None:
        """The mean clock of the rank's CPUs now; None where the kernel does not show it."""
        clocks = []
        for cpu in self._cpus:
            with suppress(OSError, ValueError):
                clocks.append(int((CPUS / f"cpu{cpu}/cpufreq/scaling_cur_freq").read_text()) / 1e3)
        if not clocks:
            clocks = _clocks_of_cpuinfo(self._cpus)
        return sum(clocks) / len(clocks) if clocks else None

    def _now(self) -> _Reading | None:
        try:
            elapsed, rows = time.monotonic(), list(_cpu_rows())
        except (OSError, ValueError):
            return None
        self._host_cpus = len(rows)
        used = [(cpu, row[_USER] + row[_NICE] + row[_SYSTEM], row[_STEAL]) for cpu, row in rows]
        own = [used_by(pid) for pid in self._sharing]
        others = [used_by(pid) for pid in self._on_host - self._sharing]
        ticks = (
            sum(busy for cpu, busy, _ in used if cpu in self._cpus),
            sum(steal for cpu, _, steal in used if cpu in self._cpus),
            sum(busy for _, busy, _ in used),
            sum(own),
            sum(own) + sum(others),
        )
        return _Reading(elapsed, *(count / self._tick for count in ticks))


def gauge_load(world: World) -> LoadGauge:
    """The gauge of this rank; a collective call, in which ranks tell each other where they run."""
    about = {"host": platform.node(), "pid": os.getpid(), "cpus": sorted(os.sched_getaffinity(0))}
    here = [row for row in world.all_gather(about) if row["host"] == about["host"]]
    own = set(os.sched_getaffinity(0))
    sharing = [row for row in here if own & set(row["cpus"])]
    cpus = {cpu for row in sharing for cpu in row["cpus"]}
    return LoadGauge(cpus, [row["pid"] for row in sharing], [row["pid"] for row in here])


def used_by(pid: int) -> int:
    """Ticks that a process and all that it started have used; 0 for a process that is gone."""
    try:
        fields = (PROC / f"{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    own = sum(int(fields[place]) for place in (_UTIME, _STIME, _CHILD_UTIME, _CHILD_STIME))
    return own + sum(used_by(child) for child in _children(pid))


def _children(pid: int) -> Iterator[int]:
    lists: list[Path] = []
    with suppress(OSError):  # a process may end while its threads are listed
        lists = list((PROC / f"{pid}/task").glob("*/children"))
    for listed in lists:
        with suppress(OSError):
            yield from map(int, listed.read_text().split())


def _cpu_rows() -> Iterator[tuple[int, list[int]]]:
    """Number and ticks of each CPU, as in `/proc/stat`."""
    for line in (PROC / "stat").read_text().splitlines():
        name, *ticks = line.split()
        if name.startswith("cpu") and name != "cpu":
            yield int(name.removeprefix("cpu")), [int(tick) for tick in ticks]


def _clocks_of_cpuinfo(cpus: Iterable[int]) -> list[float]:
    """Clocks by `/proc/cpuinfo`, for virtual machines without frequency scaling."""
    clocks: dict[int, float] = {}
    number = -1
    with suppress(OSError, ValueError):
        for line in (PROC / "cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "processor":
                number = int(value)
            elif key.strip() == "cpu MHz":
                clocks[number] = float(value)
    return [clocks[cpu] for cpu in cpus if cpu in clocks]
