"""Control groups that count and limit this process's memory, versions 1 and 2."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_MEMBERSHIP = Path("/proc/self/cgroup")
_MOUNTED = Path("/sys/fs/cgroup")
_LIMITS = {1: "memory.limit_in_bytes", 2: "memory.max"}
_NO_LIMIT_BYTES = 1 << 60  # version 1 writes a number close to 2**63 for no limit


def memory_groups(membership: Path = _MEMBERSHIP, mounted: Path = _MOUNTED) -> Iterator[tuple[int, Path]]:
    """Version and folder of each group around this process, from the innermost to the outermost.

    Folders may be missing: a container may show another hierarchy than it names.
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
    """The lowest limit of the groups around this process; None if there is no limit."""
    found = []
    for version, folder in memory_groups(membership, mounted):
        try:
            found.append(int((folder / _LIMITS[version]).read_text()))
        except (OSError, ValueError):  # missing, or `max`
            continue
    return min((limit for limit in found if limit < _NO_LIMIT_BYTES), default=None)
