"""Leases on this host's CPUs and GPUs: no two gangs of one user ever hold the same one.

A lease is a lock on a file named after the CPU or GPU, held by the gang's process, so the kernel frees it
whatever happens to that process. Gangs line up at one door: only who stands in it may collect leases, and
collects until it has all that it needs. So two gangs cannot hold half of each other's leases, and a wide
cell is not starved by narrow ones that came later.
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

_POLL_SECONDS = 0.02  # a freed lease is noticed this late; only the one gang in the door polls


def lease_folder() -> Path:
    """The user's folder of locks on this host, made if needed.

    Raises:
        SiteError: someone else made it, or others may write into it.
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
    """Hold leases for the length of a `with` block, after waiting for them in line.

    Args:
        pools: for each kind of resource its name, the numbers to choose from, and how many are needed.
        give_up: asked while waiting in the door; true ends the wait.

    Yields:
        For each pool the numbers leased, ascending; or None when `give_up` ended the wait.
    """
    folder = lease_folder()
    with ExitStack() as held:
        door = take(folder / "door.lock", wait=True)
        with door or ExitStack():
            got = [_collect(folder, held, pool, give_up) for pool in pools]
        numbers = [pool for pool in got if pool is not None]
        yield numbers if len(numbers) == len(got) else None


def _collect(
    folder: Path, held: ExitStack, pool: tuple[str, Sequence[int], int], give_up: Callable[[], bool]
) -> tuple[int, ...] | None:
    kind, numbers, needed = pool
    if needed > len(numbers):
        raise SiteError(f"{needed} {kind} leases asked for, {len(numbers)} exist: this wait would never end")
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
