"""Locks on this host's CPUs and GPUs: no two supervisors, of any users, ever hold the same one.

The lock is one on a file named after the CPU or GPU, in a folder that all users of the host share. The
supervisor's process holds it, so the kernel frees it whatever happens to that process. It takes all that it
needs or nothing, so two supervisors cannot hold half of each other's locks. Who waits holds the lock of a
queue, and those that come later for the same GPUs or CPUs wait for that lock: narrow cells cannot starve a
wide one.

A holder writes the path of its attempt into the file. The text stays when the holder ends, so it counts only
while the kernel lists the lock.
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import IO

from harness.errors import SiteError
from harness.launchers import AttemptState
from harness.launchers.launch import Launch, supervisor_identity
from harness.runs.store import Attempt
from harness.runs.stored_files import user_name

FOLDER_VARIABLE = "KRONSCALE_LOCKS"
"""Environment variable with another folder of locks, for hosts that are divided by other means."""

Pool = tuple[str, Sequence[int], int]
"""A kind of resource, `cpu` or `gpu`, the numbers to choose from, and how many are needed."""

_POLL_SECONDS = 0.05  # delay to notice a freed lock
_SHARED = 0o1777  # everyone adds files, and removes only own ones


def lock_folder() -> Path:
    """The folder of locks that all users of this host share, created if needed.

    Raises:
        SiteError: it is something else, or not all users may write into it.
    """
    folder = _lock_path()
    if not os.path.lexists(folder):
        _make_shared(folder)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or stat.S_IMODE(found.st_mode) != _SHARED:
        raise SiteError(
            f"{folder} must be a folder with mode {_SHARED:04o} to hold the locks of all users; got owner "
            f"{found.st_uid}, mode {stat.S_IMODE(found.st_mode):04o}: have its owner remove it, or name "
            f"another folder in {FOLDER_VARIABLE}"
        )
    return folder


def pools_of(launch: Launch, world_size: int) -> list[Pool]:
    """What an attempt locks before its ranks start."""
    cpus, gpus = world_size * launch.cpus_per_rank, world_size * launch.site.gpus_per_rank
    if launch.oversubscribed or launch.site.one_at_a_time:
        cpus = len(launch.cpus)
    if launch.site.one_at_a_time:
        gpus = len(launch.gpus)
    return [("cpu", launch.cpus, cpus), ("gpu", launch.gpus, gpus)]


@contextmanager
def locked(
    pools: Sequence[Pool], give_up: Callable[[], bool] = lambda: False, label: str = ""
) -> Iterator[list[tuple[int, ...]] | None]:
    """Hold locks during a `with` block, after waiting for them.

    Args:
        pools: what is needed.
        give_up: called while locks are missing; true ends the wait.
        label: the attempt's path, for `holders`.

    Yields:
        The numbers locked from each pool, ascending; or None if `give_up` ended the wait.
    """
    for kind, numbers, needed in pools:
        if needed > len(numbers):
            raise SiteError(f"{needed} {kind} locks are needed, only {len(numbers)} exist")
    folder = lock_folder()
    with ExitStack() as held:
        taken = None
        with closing(_open(folder / f"{_queue_of(pools)}.lock")) as queue:
            first = False  # in the queue
            while taken is None and not give_up():
                if not first and (first := _take(queue)):
                    _sign(queue, label)
                taken = _take_all(folder, pools, label, held) if first else None
                if taken is None:
                    time.sleep(_POLL_SECONDS)
        yield taken


def holders() -> dict[str, str]:
    """Who holds which lock now, `cpu-0`, `gpu-0`, or `cpu-0-queue`; empty where it is not known.

    A holder is the path of its attempt, or `process <pid>` if it wrote none, and its user if it is another.
    Takes no lock, so no supervisor ever waits for a reader.
    """
    try:
        listed = (line.split() for line in Path("/proc/locks").read_text().splitlines())
        pids = {line[5].rpartition(":")[2]: line[4] for line in listed if line[1] == "FLOCK"}
        held = {}
        for path in _lock_path().glob("*.lock"):
            pid = pids.get(str(path.stat().st_ino))
            if pid is not None:
                label = path.read_text(errors="replace").strip() or f"process {pid}"
                held[path.stem] = label + _other_user(pid)
    except (OSError, IndexError):
        return {}
    return held


def waiting(attempts: Iterable[Attempt]) -> dict[Attempt, AttemptState]:
    """For attempts that have not started, what they wait for; without those of which nothing is known."""
    by_sweep: dict[Path, list[Attempt]] = defaultdict(list)
    for attempt in attempts:
        by_sweep[attempt.path.parent.parent].append(attempt)
    states: dict[Attempt, AttemptState] = {}
    for pending in by_sweep.values():
        first = next(filter(_has_supervisor, pending), None)  # a queue has one attempt wait at a time
        missing = _missing_locks(first or pending[0], or_alone=first is None)
        for attempt in pending:
            why = f"queued behind {first.cell_folder.id}" if first and attempt != first else missing
            if why:
                states[attempt] = AttemptState(None, why)
    return states


def _make_shared(folder: Path) -> None:
    """Make the folder unless another process does; under its name it has its mode from the first moment."""
    made = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        made.chmod(_SHARED)  # whatever the umask is
        made.rename(folder)  # onto an empty folder too, which then was made by another process like this
    except OSError:
        made.rmdir()
        if not os.path.lexists(folder):
            raise


def _queue_of(pools: Sequence[Pool]) -> str:
    """Name of a queue's lock, after the first GPU of those that may be taken, else after the first CPU.

    Who uses other GPUs of the host, or other CPUs, does not wait in that queue.
    """
    kind, numbers, _ = next((pool for pool in reversed(pools) if pool[2]), pools[0])
    return f"{kind}-{min(numbers, default=0)}-queue"


def _take_all(
    folder: Path, pools: Sequence[Pool], label: str, held: ExitStack
) -> list[tuple[int, ...]] | None:
    """Take all that is needed into `held`, or nothing if too little is free."""
    with ExitStack() as taken:
        numbers_by_pool, locks = [], []
        for kind, numbers, needed in pools:
            free: list[int] = []
            for number in sorted(numbers):
                if len(free) == needed:
                    break
                lock = taken.enter_context(closing(_open(folder / f"{kind}-{number}.lock")))
                if _take(lock):
                    locks.append(lock)
                    free.append(number)
            if len(free) < needed:
                return None
            numbers_by_pool.append(tuple(free))
        held.enter_context(taken.pop_all())
    for lock in locks:
        _sign(lock, label)
    return numbers_by_pool


def _take(lock: IO[bytes]) -> bool:
    """Take a file's lock unless somebody holds it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _open(path: Path) -> IO[bytes]:
    """A file that all users share; kernels let nobody open others' files in a sticky folder with O_CREAT."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
    while True:
        try:
            return os.fdopen(os.open(path, flags), "rb+")
        except FileNotFoundError:
            with suppress(FileExistsError):
                file = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
                os.fchmod(file, 0o666)  # whatever the umask is
                return os.fdopen(file, "rb+")


def _sign(lock: IO[bytes], label: str) -> None:
    with suppress(OSError):  # a full disk: the lock is held all the same
        lock.truncate(0)
        lock.seek(0)
        lock.write(label.encode())
        lock.flush()


def _other_user(pid: str) -> str:
    """` of user name`, unless the process is this user's or nothing is known about it."""
    try:
        owner = Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return ""
    return "" if owner == os.getuid() else f" of user {user_name(owner)}"


def _lock_path() -> Path:
    named = os.environ.get(FOLDER_VARIABLE)
    return Path(named) if named else Path("/tmp/kronscale-locks")  # noqa: S108  shared by all users on purpose


def _has_supervisor(attempt: Attempt) -> bool:
    supervisor = supervisor_identity(attempt)
    return supervisor is not None and supervisor.host == socket.gethostname() and supervisor.alive()


def _missing_locks(attempt: Attempt, *, or_alone: bool) -> str:
    """What it waits for, and who has it; with `or_alone` only where the site runs cells one at a time."""
    launch = Launch.read(attempt)
    if launch is None or (or_alone and not launch.site.one_at_a_time):
        return ""
    holder_by_lock, own = holders(), str(attempt.path.resolve())
    parts = []
    pools = pools_of(launch, attempt.cell_folder.cell().world_size)
    for kind, numbers, needed in pools:
        held = Counter(holder_by_lock.get(f"{kind}-{number}", own) for number in numbers)
        if needed > held.pop(own, 0):
            others = ", ".join(f"{_name(holder)} holds {count}" for holder, count in held.items())
            parts.append(f"waits for {needed} of {len(numbers)} {kind.upper()}s; {others}")
    first = holder_by_lock.get(_queue_of(pools), own)
    if first != own:
        parts.append(f"after {_name(first)}, which came first")
    return "; ".join(parts)


def _name(label: str) -> str:
    """`sweep/cell` of an attempt's path, with its user if it is another; any other label as it is."""
    text, of_user, user = label.partition(" of user ")
    path = Path(text)
    return f"{path.parts[-3]}/{path.parts[-2]}{of_user}{user}" if path.name.startswith("attempt-") else label
