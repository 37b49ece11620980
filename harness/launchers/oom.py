"""Whether memory ran out: Python's errors, Slurm's messages, and the kernel's count of killed processes."""

from __future__ import annotations

import re

from harness.launchers.cgroups import memory_groups

_MEMORY_ERRORS = ("MemoryError", "OutOfMemoryError", "out of memory", "can't allocate memory")
_SLURM_KILLED = re.compile(
    r"oom[-_ ]?kill|out[-_ ]of[-_ ]memory", re.IGNORECASE
)  # not: a node called bloom01
_COUNTERS = {1: "memory.oom_control", 2: "memory.events"}


def is_memory_error(text: str) -> bool:
    """Whether the first line of an exception reports that host or device memory ran out."""
    return any(words in text for words in _MEMORY_ERRORS)


def slurm_killed(log: str) -> bool:
    """Whether srun's output reports that a step was killed for memory."""
    return _SLURM_KILLED.search(log) is not None


def oom_kills() -> int | None:
    """Processes of this control group that the kernel killed for memory; None if there is no such count."""
    for version, folder in memory_groups():
        path = folder / _COUNTERS[version]
        try:
            fields = dict(line.split() for line in path.read_text().splitlines())
            return int(fields["oom_kill"])
        except (OSError, KeyError, ValueError):  # a container may show another hierarchy than it names
            continue
    return None
