"""Leases on this host's CPUs and GPUs: no two supervisors of one user ever hold the same one.

A lease is a lock on a file named after the CPU or GPU. The supervisor's process holds it, so the kernel frees
it whatever happens to that process. Supervisors queue for one more lock: only its holder may collect leases,
and it keeps the lock until it has all that it needs. So two supervisors cannot hold half of each other's
leases, and later narrow cells cannot starve a wide one.

A holder writes the path of its attempt into the file. The text stays when the holder ends, so it counts only
while the kernel lists the lock.
"""

from __future__ import annotations

import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

from harness.errors import SiteError
from harness.launchers.launch import Launch
from harness.runs.locks import take

QUEUE_LOCK = "door"
"""Name of the queue's lock among the holders."""

Pool = tuple[str, Sequence[int], int]
"""A kind of resource, `cpu` or `gpu`, the numbers to choose from, and how many are needed."""

_POLL_SECONDS = 0.02  # delay to notice a freed lease; only the holder of the queue lock polls


def lease_folder() -> Path:
    """The user's folder of locks on this host, created if needed.

    Raises:
        SiteError: someone else owns it, or others may write into it.
    """
    folder = _lease_path()
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise SiteError(
            f"{folder} must be a folder of user {os.getuid()} with mode 0700 to hold leases; "
            f"got owner {found.st_uid}, mode {stat.S_IMODE(found.st_mode):04o}: remove it"
        )
    return folder


def pools_of(launch: Launch, world_size: int) -> list[Pool]:
    """What an attempt leases before its ranks start."""
    cpus = len(launch.cpus) if launch.oversubscribed else world_size * launch.cpus_per_rank
    return [("cpu", launch.cpus, cpus), ("gpu", launch.gpus, world_size * launch.site.gpus_per_rank)]


def holders() -> dict[str, str]:
    """Who holds which lease now, `cpu-0` or `gpu-0`, and the queue's lock; empty where it is not known.

    A holder is the path of its attempt, or `process <pid>` if it wrote none. Takes no lock, so no supervisor
    ever waits for a reader.
    """
    try:
        listed = (line.split() for line in Path("/proc/locks").read_text().splitlines())
        pids = {line[5].rpartition(":")[2]: line[4] for line in listed if line[1] == "FLOCK"}
        found = {}
        for path in _lease_path().glob("*.lock"):
            pid = pids.get(str(path.stat().st_ino))
            if pid is not None:
                found[path.stem] = path.read_text(errors="replace").strip() or f"process {pid}"
    except (OSError, IndexError):
        return {}
    return found


@contextmanager
def leased(
    pools: Sequence[Pool], give_up: Callable[[], bool] = lambda: False, label: str = ""
) -> Iterator[list[tuple[int, ...]] | None]:
    """Hold leases during a `with` block, after waiting for them.

    Args:
        pools: what is needed.
        give_up: called while the lock of the queue is held and leases are missing; true ends the wait.
        label: the attempt's path, for `holders`.

    Yields:
        The numbers leased from each pool, ascending; or None if `give_up` ended the wait.
    """
    folder = lease_folder()
    with ExitStack() as held:
        queue_lock = take(folder / f"{QUEUE_LOCK}.lock", wait=True)
        with queue_lock or ExitStack():
            _sign(queue_lock, label)
            got = [_collect(folder, held, pool, give_up, label) for pool in pools]
        numbers = [pool for pool in got if pool is not None]
        yield numbers if len(numbers) == len(got) else None


def _collect(
    folder: Path, held: ExitStack, pool: Pool, give_up: Callable[[], bool], label: str
) -> tuple[int, ...] | None:
    kind, numbers, needed = pool
    if needed > len(numbers):
        raise SiteError(f"{needed} {kind} leases are needed, only {len(numbers)} exist")
    got: set[int] = set()
    while len(got) < needed:
        for number in numbers:
            if number not in got and len(got) < needed:
                file = take(folder / f"{kind}-{number}.lock")
                if file is not None:
                    held.enter_context(file)
                    _sign(file, label)
                    got.add(number)
        if len(got) < needed:
            if give_up():
                return None
            time.sleep(_POLL_SECONDS)
    return tuple(sorted(got))


def _sign(lock: IO[bytes] | None, label: str) -> None:
    if lock is not None:
        with suppress(OSError):  # a full disk: the lease is held all the same
            lock.truncate(0)
            lock.write(label.encode())
            lock.flush()


def _lease_path() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    parent = Path(runtime) if runtime and Path(runtime).is_dir() else Path(tempfile.gettempdir())
    return parent / f"kronscale-{os.getuid()}"
