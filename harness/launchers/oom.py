"""Whether memory ran out: the kernel's count of processes that it killed for it, and Python's errors."""

from __future__ import annotations

from pathlib import Path

_MEMORY_ERRORS = ("MemoryError", "OutOfMemoryError", "out of memory", "can't allocate memory")


def is_memory_error(text: str) -> bool:
    """Whether an exception's first line says that host or device memory ran out."""
    return any(words in text for words in _MEMORY_ERRORS)


def oom_kills() -> int | None:
    """Processes of this control group that the kernel killed for memory; None where it does not say."""
    for path in _counters(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")):
        try:
            fields = dict(line.split() for line in path.read_text().splitlines())
            return int(fields["oom_kill"])
        except (OSError, KeyError, ValueError):  # a container may show another hierarchy than it names
            continue
    return None


def _counters(membership: Path, mounted: Path) -> list[Path]:
    """Where versions 2 and 1 of control groups keep the count, the most specific group first."""
    found = []
    for line in membership.read_text().splitlines() if membership.exists() else []:
        _, controllers, group = line.split(":", 2)
        inside = group.lstrip("/")
        if controllers == "":
            found += [mounted / part / "memory.events" for part in (inside, "")]
        elif "memory" in controllers.split(","):
            found += [
                mounted / "memory" / inside / "memory.oom_control",
                mounted / "memory/memory.oom_control",
            ]
    return found
