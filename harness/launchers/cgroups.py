"""Control groups that count this process's memory, versions 1 and 2."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_MEMBERSHIP = Path("/proc/self/cgroup")
_MOUNTED = Path("/sys/fs/cgroup")


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
