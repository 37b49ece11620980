"""Shows the progress of a study until it has ended: a live view in a terminal, plain lines in a pipe."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import fmean

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from harness.study.cell_states import IN_FLIGHT
from harness.study.status import CellStatus, count_states

_MIN_PAUSE_SECONDS = 0.5
_CPU_SHARE = 0.05  # upper limit of one CPU for reading statuses: the ranks beside it are being timed
_LINE_SECONDS = 30.0  # in a pipe: a line at every change of the counts, and at least this often
_MAX_ROWS = 20


def follow(read: Callable[[], Sequence[CellStatus]], screen: Console) -> Sequence[CellStatus]:
    """Show progress until no cell is pending or running.

    Args:
        read: reads the current statuses.
        screen: console to print on.

    Returns:
        The last statuses.
    """
    return _follow_live(read, screen) if screen.is_terminal else _follow_in_lines(read, screen)


def state_counts(statuses: Sequence[CellStatus]) -> str:
    """Such as `38 COMPLETED, 2 RUNNING`."""
    counts = count_states(statuses)
    return ", ".join(f"{count} {state}" for state, count in counts.items()) or "no cells"


def left_seconds(statuses: Sequence[CellStatus]) -> float | None:
    """Estimate of the time until all cells have ended.

    A cell is expected to take as long as the completed ones of its method and world size did, or else as all
    completed ones; as many run at a time as do now. None before the first has completed.
    """
    taken: dict[tuple[str, int], list[float]] = defaultdict(list)
    for one in statuses:
        if one.state == "COMPLETED" and one.elapsed_seconds is not None:
            taken[one.cell.method, one.cell.world_size].append(one.elapsed_seconds)
    if not taken:
        return None
    overall = fmean(seconds for found in taken.values() for seconds in found)
    work = 0.0
    for one in statuses:
        if one.state in IN_FLIGHT:
            found = taken.get((one.cell.method, one.cell.world_size))
            expected = fmean(found) if found else overall
            work += max(expected - (one.elapsed_seconds or 0.0 if one.state == "RUNNING" else 0.0), 0.0)
    return work / max(1, sum(one.state == "RUNNING" for one in statuses))


def duration(seconds: float | None) -> str:
    """A duration as `1h02m`, `3m05s` or `12s`; `-` if unknown."""
    if seconds is None:
        return "-"
    minutes, seconds_left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{seconds_left:02}s" if minutes else f"{seconds_left}s"


def steps(status: CellStatus) -> str:
    """Such as `41/300`; empty before the first step."""
    if status.step is None:
        return ""
    return f"{status.step}/{status.total_steps}" if status.total_steps else str(status.step)


def metric(status: CellStatus) -> str:
    """The newest value beside its target, such as `accuracy 0.953 (>= 0.97)`."""
    target = status.cell.target
    value = f"{status.value:.4g}" if status.value is not None else "-"
    return f"{target.metric} {value} ({target.sign} {target.value:g})"


def _follow_live(read: Callable[[], Sequence[CellStatus]], screen: Console) -> Sequence[CellStatus]:
    with Live(console=screen, auto_refresh=False) as live:
        while True:
            begins = time.monotonic()
            statuses = read()
            live.update(_live_view(statuses), refresh=True)
            if not _in_flight(statuses):
                return statuses
            _pause(time.monotonic() - begins)


def _follow_in_lines(read: Callable[[], Sequence[CellStatus]], screen: Console) -> Sequence[CellStatus]:
    printed, printed_at = "", 0.0
    while True:
        begins = time.monotonic()
        statuses = read()
        line = state_counts(statuses)
        if line != printed or begins - printed_at > _LINE_SECONDS:
            left = _left_in_words(statuses)
            screen.print(f"{time.strftime('%H:%M:%S')} {line}{left}", soft_wrap=True, markup=False)
            printed, printed_at = line, begins
        if not _in_flight(statuses):
            return statuses
        _pause(time.monotonic() - begins)


def _pause(cost_seconds: float) -> None:
    time.sleep(max(_MIN_PAUSE_SECONDS, cost_seconds / _CPU_SHARE))


def _in_flight(statuses: Sequence[CellStatus]) -> bool:
    return any(status.state in IN_FLIGHT for status in statuses)


def _left_in_words(statuses: Sequence[CellStatus]) -> str:
    left = left_seconds(statuses) if _in_flight(statuses) else None
    return f"; about {duration(left)} left" if left is not None else ""


def _live_view(statuses: Sequence[CellStatus]) -> RenderableType:
    bar = Progress(BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    final = sum(status.final for status in statuses)
    words = f"{state_counts(statuses)}{_left_in_words(statuses)}"
    bar.add_task(words, total=len(statuses), completed=final)
    running = [status for status in statuses if status.state == "RUNNING"]
    table = Table(box=None, pad_edge=False)
    for heading in ("method", "ranks", "seed", "step", "phase", "metric", "elapsed", "at most"):
        table.add_column(heading)
    for status in running[:_MAX_ROWS]:
        cell = status.cell
        identity = (cell.method, str(cell.world_size), str(cell.seed), steps(status), status.phase or "start")
        times = (duration(status.elapsed_seconds), duration(status.eta_seconds))
        table.add_row(*identity, metric(status), *times)
    return Group(bar, table) if running else bar
