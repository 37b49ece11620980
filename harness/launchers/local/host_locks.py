"""Locks on this host's CPUs and GPUs: no two supervisors, of any users, ever hold the same one.

The lock is one on a file named after the CPU or GPU, in a folder that all users of the host share. The
supervisor's process holds it, so the kernel frees it whatever happens to that process. A supervisor that
waits has an entry in the queue, a locked file that says what it needs. Whoever looks for locks holds the lock
of the queue, and considers the entries before its own: first come, first served. Those that cannot start yet
are passed by smaller ones that fit, but only while they have waited for less than `PASSABLE_SECONDS`; then
what becomes free is kept for them. So two supervisors cannot hold half of each other's locks, and later
narrow cells cannot starve a wide one.

A holder writes the path of its attempt into the file. The text stays when the holder ends, so it counts only
while the kernel lists the lock.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import stat
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from harness.errors import SiteError
from harness.launchers import AttemptState
from harness.launchers.launch import Launch, supervisor_identity
from harness.runs.store import Attempt
from harness.runs.stored_files import user_name

FOLDER_VARIABLE = "KRONSCALE_LOCKS"
"""Environment variable with another folder of locks, for hosts that are divided by other means."""

PASSABLE_SECONDS = 600.0
"""How long smaller work may go ahead of a supervisor that waits."""

Pool = tuple[str, Sequence[int], int]
"""A kind of resource, `cpu` or `gpu`, the numbers to choose from, and how many are needed."""

_QUEUE = "queue"
_POLL_SECONDS = 0.05  # delay to notice a freed lock
_SHARED = 0o1777  # everyone adds files, and removes only own ones


@dataclass(frozen=True)
class QueueEntry:
    """A supervisor that waits.

    Attributes:
        came: monotonic clock of the host, nanoseconds.
        label: the attempt's path.
        pools: what it needs.
        user: whose it is.
    """

    came: int
    label: str
    pools: tuple[Pool, ...]
    user: str

    @property
    def passable(self) -> bool:
        """Whether smaller work may still go ahead of it."""
        return time.monotonic_ns() - self.came < PASSABLE_SECONDS * 1e9


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


def holders() -> dict[str, str]:
    """Who holds which lock now, `cpu-0` or `gpu-0`; empty where it is not known.

    A holder is the path of its attempt, or `process <pid>` if it wrote none, and its user if it is another.
    Takes no lock, so no supervisor ever waits for a reader.
    """
    try:
        listed = (line.split() for line in Path("/proc/locks").read_text().splitlines())
        pids = {line[5].rpartition(":")[2]: line[4] for line in listed if line[1] == "FLOCK"}
        found = {}
        for path in _lock_path().glob("*.lock"):
            pid = pids.get(str(path.stat().st_ino))
            if pid is not None and path.stem != _QUEUE:
                label = path.read_text(errors="replace").strip() or f"process {pid}"
                found[path.stem] = label + _other_user(pid)
    except (OSError, IndexError):
        return {}
    return found


def queued(*, remove_dead: bool = False) -> list[QueueEntry]:
    """The supervisors that wait, of all users, in order of arrival.

    Args:
        remove_dead: remove entries of killed supervisors; only who holds the queue's lock can tell them.
    """
    found = []
    for path in _lock_path().glob("*.waiting"):
        with suppress(OSError, ValueError, TypeError, KeyError):  # it has gone, or was never complete
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            with os.fdopen(file, "rb") as entry:
                if _is_locked(entry):
                    found.append(_read_entry(entry))
                elif remove_dead:
                    path.unlink()
    return sorted(found, key=lambda one: (one.came, one.label))


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
        with _queued(folder, pools, label) as own:
            got = _take_all(folder, held, own)
            while got is None and not give_up():
                time.sleep(_POLL_SECONDS)
                got = _take_all(folder, held, own)
        yield got


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


def _take_all(folder: Path, held: ExitStack, own: QueueEntry) -> list[tuple[int, ...]] | None:
    """Take what the entry needs, if it is free and not for those before it; None if it is not."""
    with closing(_open(folder / f"{_QUEUE}.lock")) as lock, ExitStack() as looked_at:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = queued(remove_dead=True)
        before = [one for one in waiting if (one.came, one.label) < (own.came, own.label)]
        wanted = {
            (kind, number) for one in (*before, own) for kind, numbers, _ in one.pools for number in numbers
        }
        files = {}
        for kind, number in sorted(wanted):
            file = looked_at.enter_context(closing(_open(folder / f"{kind}-{number}.lock")))
            if not _is_locked(file):
                files[kind, number] = file
        free = set(files)
        for one in before:
            chosen = _choose(one.pools, free, whole=one.passable)
            free -= chosen
        chosen = _choose(own.pools, free, whole=True)
        if len(chosen) < sum(needed for _, _, needed in own.pools):
            return None
        for resource in sorted(chosen):
            file = os.fdopen(os.dup(files[resource].fileno()), "rb+")  # the lock goes with it
            held.enter_context(file)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _sign(file, own.label)
    return [
        tuple(sorted(number for of, number in chosen if of == kind and number in numbers))
        for kind, numbers, _ in own.pools
    ]


def _choose(pools: Sequence[Pool], free: Collection[tuple[str, int]], *, whole: bool) -> set[tuple[str, int]]:
    """The free locks that would be taken, or kept; with `whole` all that are needed or none."""
    chosen: set[tuple[str, int]] = set()
    for kind, numbers, needed in pools:
        found = [(kind, number) for number in sorted(numbers) if (kind, number) in free][:needed]
        if whole and len(found) < needed:
            return set()
        chosen.update(found)
    return chosen


@contextmanager
def _queued(folder: Path, pools: Sequence[Pool], label: str) -> Iterator[QueueEntry]:
    """An entry of the queue that is there during the `with` block."""
    own = QueueEntry(time.monotonic_ns(), label or f"process {os.getpid()}", tuple(pools), "")
    path = folder / f"{own.came}-{os.getpid()}.waiting"
    content = {"came": own.came, "label": own.label, "pools": own.pools}
    with closing(_open(folder / f"{_QUEUE}.lock")) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # else it could be seen before it is locked
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644), "rb+")
        os.fchmod(file.fileno(), 0o644)
        fcntl.flock(file, fcntl.LOCK_EX)
        with suppress(OSError):  # on a full disk nobody lets it go first
            file.write(json.dumps(content).encode())
            file.flush()
    try:
        yield own
    finally:
        path.unlink(missing_ok=True)
        file.close()


def _read_entry(file: IO[bytes]) -> QueueEntry:
    content = json.loads(file.read())
    pools = tuple((str(kind), tuple(numbers), int(needed)) for kind, numbers, needed in content["pools"])
    owner = os.fstat(file.fileno()).st_uid
    return QueueEntry(int(content["came"]), str(content["label"]), pools, user_name(owner))


def _is_locked(file: IO[bytes]) -> bool:
    """Whether somebody holds the file's lock; it is not held after this."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(file, fcntl.LOCK_UN)
    return False


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


def waiting(attempts: Iterable[Attempt]) -> dict[Attempt, AttemptState]:
    """For attempts that have not started, what they wait for; without those of which nothing is known."""
    by_sweep: dict[Path, list[Attempt]] = defaultdict(list)
    for attempt in attempts:
        by_sweep[attempt.path.parent.parent].append(attempt)
    found: dict[Attempt, AttemptState] = {}
    for pending in by_sweep.values():
        first = next(filter(_has_supervisor, pending), None)  # a queue has one attempt wait at a time
        missing = _missing_locks(first or pending[0], or_alone=first is None)
        for attempt in pending:
            why = f"queued behind {first.cell_folder.id}" if first and attempt != first else missing
            if why:
                found[attempt] = AttemptState(None, why)
    return found


def _has_supervisor(attempt: Attempt) -> bool:
    supervisor = supervisor_identity(attempt)
    return supervisor is not None and supervisor.host == socket.gethostname() and supervisor.alive()


def _missing_locks(attempt: Attempt, *, or_alone: bool) -> str:
    """What it waits for; with `or_alone` only where the site runs cells one at a time."""
    launch = Launch.read(attempt)
    if launch is None or (or_alone and not launch.site.one_at_a_time):
        return ""
    held, own = holders(), _name(str(attempt.path.resolve()))
    by_holder = {lock: _name(label) for lock, label in held.items()}
    parts = []
    for kind, numbers, needed in pools_of(launch, attempt.cell_folder.cell().world_size):
        others: dict[str, list[int]] = defaultdict(list)
        for number in numbers:
            others[by_holder.get(f"{kind}-{number}", "")].append(number)
        others.pop("", None)
        missing = needed - len(others.pop(own, ()))
        if missing > 0 and others:
            more = f"{missing} more" if missing < needed else str(missing)
            parts.append(f"waits for {more} of {kind.upper()}s {_ranges(numbers)}; {_in_words(kind, others)}")
    if first := _first_in_line(str(attempt.path.resolve())):
        parts.append(f"after {first}, which came first")
    return "; ".join(parts)


def _first_in_line(own: str) -> str:
    """The attempt that has waited longest, if that is before `own`."""
    line = queued()
    if not line or line[0].label == own or own not in (one.label for one in line):
        return ""
    other = "" if line[0].user == user_name() else f" of user {line[0].user}"
    return _name(line[0].label) + other


def _in_words(kind: str, others: Mapping[str, Sequence[int]]) -> str:
    return ", ".join(f"{holder} holds {kind.upper()} {_ranges(held)}" for holder, held in others.items())


def _name(label: str) -> str:
    """`sweep/cell` of an attempt's path, with its user if it is another; any other label as it is."""
    text, of_user, user = label.partition(" of user ")
    path = Path(text)
    return f"{path.parts[-3]}/{path.parts[-2]}{of_user}{user}" if path.name.startswith("attempt-") else label


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as `0-3,7`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
