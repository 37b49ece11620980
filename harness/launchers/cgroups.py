"""The control groups that count and limit this process's memory, in both versions of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_MEMBERSHIP = Path("/proc/self/cgroup")
_MOUNTED = Path("/sys/fs/cgroup")
_LIMITS = {1: "memory.limit_in_bytes", 2: "memory.max"}
_NO_LIMIT_BYTES = 1 << 60  # version 1 says "none" by a number close to 2**63


def memory_groups(membership: Path = _MEMBERSHIP, mounted: Path = _MOUNTED) -> Iterator[tuple[int, Path]]:
    """Version and folder of each group around this process, the most specific first, up to the outermost.

    Not all folders need be there: a container may show another hierarchy than it names.
    """
    for line in membership.read_text().splitlines() if membership.exists() else []:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            version, top = 2, mounted
        elif "memory" in controllers.split(","):
            version, top = 1, mounted / "memory"
        else:
            continue
        folder = top / group.lstrip("/")
        yield version, folder
        while folder != top:
            folder = folder.parent
            yield version, folder


def memory_limit_bytes(membership: Path = _MEMBERSHIP, mounted: Path = _MOUNTED) -> int | None:
    """The least that a group around this process may use; None where there is no limit."""
    found = []
    for version, folder in memory_groups(membership, mounted):
        try:
            found.append(int((folder / _LIMITS[version]).read_text()))
        except (OSError, ValueError):  # not there, or `max`
            continue
    return min((limit for limit in found if limit < _NO_LIMIT_BYTES), default=None)
