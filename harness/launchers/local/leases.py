"""Leases on this host's CPUs and GPUs: no two supervisors of one user ever hold the same one.

A lease is a lock on a file named after the CPU or GPU. The supervisor's process holds it, so the kernel frees
it whatever happens to that process. Supervisors queue for one more lock: only its holder may collect leases,
and it keeps the lock until it has all that it needs. So two supervisors cannot hold half of each other's
leases, and later narrow cells cannot starve a wide one.
"""

from __future__ import annotations

import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from harness.errors import SiteError
from harness.runs.locks import take

_POLL_SECONDS = 0.02  # delay to notice a freed lease; only the holder of the queue lock polls


def lease_folder() -> Path:
    """The user's folder of locks on this host, created if needed.

    Raises:
        SiteError: someone else owns it, or others may write into it.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    parent = Path(runtime) if runtime and Path(runtime).is_dir() else Path(tempfile.gettempdir())
    folder = parent / f"kronscale-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise SiteError(
            f"{folder} must be a folder of user {os.getuid()} with mode 0700 to hold leases; "
            f"got owner {found.st_uid}, mode {stat.S_IMODE(found.st_mode):04o}: remove it"
        )
    return folder


@contextmanager
def leased(
    pools: Sequence[tuple[str, Sequence[int], int]], give_up: Callable[[], bool] = lambda: False
) -> Iterator[list[tuple[int, ...]] | None]:
    """Hold leases during a `with` block, after waiting for them.

    Args:
        pools: for each kind of resource its name, the numbers to choose from, and how many are needed.
        give_up: called while the lock of the queue is held and leases are missing; true ends the wait.

    Yields:
        The numbers leased from each pool, ascending; or None if `give_up` ended the wait.
    """
    folder = lease_folder()
    with ExitStack() as held:
        queue_lock = take(folder / "door.lock", wait=True)
        with queue_lock or ExitStack():
            got = [_collect(folder, held, pool, give_up) for pool in pools]
        numbers = [pool for pool in got if pool is not None]
        yield numbers if len(numbers) == len(got) else None


def _collect(
    folder: Path, held: ExitStack, pool: tuple[str, Sequence[int], int], give_up: Callable[[], bool]
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
                    got.add(number)
        if len(got) < needed:
            if give_up():
                return None
            time.sleep(_POLL_SECONDS)
    return tuple(sorted(got))
