"""Why a pending attempt of this host does not run yet: its place in the queue, or the locks it waits for."""

from __future__ import annotations

import socket
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from harness.launchers.attempt_state import AttemptState
from harness.launchers.launch import Launch, supervisor_identity
from harness.launchers.local.host_locks import holders, pools_of, queued
from harness.runs.store import Attempt
from harness.runs.stored_files import user_name


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
